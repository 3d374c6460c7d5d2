"""Rows that a boolean mask chooses, of logits and of labels alike: all rows, of which the others are ignored.

How many rows a mask chooses is known at run time only. A sum over the chosen ones is the sum over all rows where the
others count for nothing, and so needs no such number; the GEMMs are those of all rows, as the plain code's are.
"""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.size_checks import mask_of, same_value
from megacpp_compile.matchers.linear_cross_entropy.heads import HeadLoss
from megacpp_compile.matchers.linear_cross_entropy.rows import RowView


def by_labels(site: HeadLoss) -> HeadLoss:
    """`site` on all rows, with the labels that are chosen, where one mask chooses rows and labels and nothing reads
    single rows; else `site` itself."""
    split = _split(site.logits.moves())
    if split is None or len(site.targets) != 1 or not site.summed:
        return site
    views, masked = split
    (target,), mask = site.targets, mask_of(masked.node)
    labels_mask = mask_of(target)
    if mask is None or labels_mask is None or not same_value(mask, labels_mask):
        return site
    if any(o.part is not None or o.read.weights or o.read.kind != "loss" for o in site.outputs):
        return site
    labels: Node = target.args[0]  # type: ignore[assignment]
    sizes, rows = value(labels).shape, value(mask).shape
    if len(sizes) != len(rows) or not all(map(same_size, sizes, rows)):
        return site
    logits = dataclasses.replace(site.logits, views=views, node=masked.source, dim=masked.before)
    return dataclasses.replace(site, logits=logits, targets=(labels,), mask=mask)


def _split(moves: tuple[RowView, ...]) -> tuple[tuple[RowView, ...], RowView] | None:
    """(the views in front of the one by a mask, that view), if those behind it leave the rows in their order."""
    for i, view in enumerate(moves):
        if mask_of(view.node) is not None:
            return (moves[:i], view) if not any(later.key for later in moves[i + 1 :]) else None
    return None
