"""Matches updates of an expert's rows, and the chains that a loop makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.index_reads import added_rows, indexed
from megacpp_compile.matchers.moe.routing import Mask
from megacpp_compile.matchers.moe.rows import picked
from megacpp_compile.matchers.views import RESHAPES

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """`node` is `previous` with `added` in the rows of `token`, a mask over tokens.

    Attributes:
        once: the sum of both is written, so that a row that comes twice counts once.
        overwrites: `added` alone is written; what was there before is lost.
        by_slot: what is written to has a row for every choice of a token, [T, k, d].
    """

    node: Node
    previous: Node
    token: Mask
    added: Node
    once: bool = False
    overwrites: bool = False
    by_slot: bool = False


def row_update(node: Node) -> RowUpdate | None:
    """The update of one expert's rows that `node` is."""
    args = node.args
    if (sum_ := added_rows(node)) is not None:
        rows = picked([sum_[1]])
        return RowUpdate(node, _unviewed(sum_[0]), rows, sum_[2]) if rows else None
    if node.target is aten.index_put.default:
        previous, positions, added, *more = args
        rows = picked(positions)  # type: ignore[arg-type]
        if rows is None and isinstance(added, Node) and not (more and more[0]):
            return _of_slots(node)
        if rows is None or not isinstance(added, Node):
            return None
        previous = _unviewed(previous)  # type: ignore[arg-type]
        if more and more[0]:
            return RowUpdate(node, previous, rows, added)  # type: ignore[arg-type]
        if added.target is aten.add.Tensor and not added.kwargs:
            for old, new in (added.args, added.args[::-1]):
                read = indexed(old) if isinstance(old, Node) else None
                if read and _unviewed(read[0]) is previous and picked(read[1]) == rows and isinstance(new, Node):
                    return RowUpdate(node, previous, rows, new, once=True)  # type: ignore[arg-type]
        if rows.dims == ("t",) and not rows.any:
            return RowUpdate(node, previous, rows, added, overwrites=True)  # type: ignore[arg-type]
    return None


def row_updates(view: GraphView) -> dict[Node, RowUpdate]:
    """All updates of rows in the graph."""
    return {node: update for node in view.graph.nodes if (update := row_update(node)) is not None}


def _of_slots(node: Node) -> RowUpdate | None:
    """The write of one expert's outputs to the places of its tokens and choices."""
    previous, positions, added, *_ = node.args
    slots, shape = picked(positions, slots=True), value(previous).shape  # type: ignore[arg-type]
    if slots is None or len(shape) != len(positions) + 1 or len(positions) != value(slots.indices).dim():  # type: ignore[arg-type]
        return None
    if not all(map(same_size, shape[:-1], value(slots.indices).shape)):
        return None
    return RowUpdate(node, _unviewed(previous), slots, added, overwrites=True, by_slot=True)  # type: ignore[arg-type]


def _unviewed(node: Node) -> Node:
    """`node` before reshapes that end in its own shape, which in-place additions to a view leave behind."""
    inner, shape = node, value(node).shape
    while inner.target in RESHAPES:
        inner = inner.args[0]  # type: ignore[assignment]
        own = value(inner).shape
        if len(own) == len(shape) and all(map(same_size, own, shape)) or is_filled(inner, 0.0):
            node = inner
    return node


def chains(updates: dict[Node, RowUpdate]) -> Iterator[list[RowUpdate]]:
    """The updates of one another's results, first update first."""
    inside = {update.previous for update in updates.values() if update.previous in updates}
    for node, last in updates.items():
        if node not in inside:
            chain = [last]
            while chain[0].previous in updates:
                chain.insert(0, updates[chain[0].previous])
            yield chain
