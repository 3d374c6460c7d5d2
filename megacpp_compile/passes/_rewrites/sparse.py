"""Emits an attention over listed rows: absorbed queries, `sparse_mla` over latent rows by the list, results by W_uv."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.views import COPIES, PERMUTATIONS, RESHAPES, is_cast
from megacpp_compile.matchers.latent_attention.lists import Axes
from megacpp_compile.matchers.latent_attention.over_latents import LatentAttention
from megacpp_compile.matchers.latent_attention.selections import Selection
from megacpp_compile.passes._rewrites.absorbed import Sizes, absorbed_queries, expanded_result, latent_rows
from megacpp_compile.passes._rewrites.absorbed_weights import taken
from megacpp_compile.reader.links import chain

_VIEWS = COPIES | PERMUTATIONS | RESHAPES | {aten.mT.default}


def emit(build: Builder, found: LatentAttention, selected: Selection) -> tuple[Node, list[Node]]:
    """(the op, the node in the place of the attention's result)."""
    size, dtype = Sizes(build, found), _dtype(found)
    rows = build(aten.unsqueeze.default, latent_rows(build, found, size, dtype), 2)
    pieces = absorbed_queries(build, found, dtype)
    q = build.joined(pieces, -1)
    causal, last = selected.last is not None, selected.last or 0
    op = build(
        torch.ops.megacpp.sparse_mla.default, q, rows, _indices(build, selected, size), None, found.core.scale,
        found.sizes["r"], causal, last,
    )  # fmt: skip
    return op, [expanded_result(build, found, build.item(op, 0), op, size, dtype, True)]


def _dtype(found: LatentAttention) -> torch.dtype:
    """The widest that keys are rounded to before they are multiplied, perhaps in a wider one."""
    dtype = value(found.expanded[0]).dtype
    for _, keys in found.core.scores:
        dtype = torch.promote_types(dtype, _rounded_to(keys.node))
    return dtype


def _rounded_to(node: Node) -> torch.dtype:
    """The narrowest dtype of what `node` is views and casts of."""
    return min((value(n).dtype for n in chain(node, is_cast, _VIEWS)), key=lambda one: one.itemsize)


def _indices(build: Builder, selected: Selection, size: Sizes) -> Node:
    """[b, t, 1, k] in int32, as the op keeps it for backward: the list, with -1 for rows that a query does not see, and
    for all but one of the entries that name the same row."""
    k = build.size(selected.index, selected.axes.index("k"))
    index = _over(build, selected.index, selected.axes, "btk", [size("b"), size("t"), k])
    wide, seen = build.cast(index, torch.int64), None
    if selected.repeats:  # every row keeps the number of one entry
        options: dict[str, Any] = {"dtype": torch.int32, "device": value(index).device}
        entries = build(aten.expand.default, build(aten.arange.default, k, **options), [size("b"), size("t"), k])
        kept = build(aten.full.default, [size("b"), size("t"), size("s")], 0, **options)
        kept = build(aten.gather.default, build(aten.scatter.src, kept, -1, wide, entries), -1, wide)
        seen = build(aten.eq.Tensor, kept, entries)
    for one in selected.conditions:
        told = _over(build, one.node, one.axes, "bts", [size("b"), size("t"), size("s")])
        told = build(aten.gather.default, told, -1, wide)
        told = build(aten.logical_not.default, told) if one.hidden else told
        seen = told if seen is None else build(aten.logical_and.default, seen, told)
    if seen is not None:
        absent = build(aten.full.default, [], -1, dtype=value(index).dtype, device=value(index).device)
        index = build(aten.where.self, seen, index, absent)
    return build(aten.unsqueeze.default, build.cast(index, torch.int32), 2)


def _over(build: Builder, node: Node, have: Axes, axes: str, sizes: list[Any]) -> Node:
    """`node`, whose dimensions are `have`, over all of `axes`."""
    return build(aten.expand.default, taken(build, node, [(axis, 0, None) for axis in have], axes), sizes)
