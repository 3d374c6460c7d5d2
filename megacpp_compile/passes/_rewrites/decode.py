"""Emits the absorbed form of a decoding step: `mla_decode` over rows of latents, and how many of them there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.matchers.latent_attention.masks import Seen, SeenRows
from megacpp_compile.matchers.latent_attention.over_latents import LatentAttention
from megacpp_compile.passes._rewrites.absorbed import Sizes, absorbed_queries, expanded_result, latent_rows
from megacpp_compile.passes._rewrites.absorbed_weights import taken

# What a row is hidden by where data says so: its exponential is 0 beside any other's, and it is no infinity, of which a
# product with 0 would be no number.
LOW = -1e30


def emit(build: Builder, found: LatentAttention) -> tuple[Node, list[Node]]:
    """(the op, the node in the place of the attention's result)."""
    core, sizes = found.core, found.sizes
    dtype = torch.promote_types(value(found.latent.node).dtype, value(found.expanded[0]).dtype)
    size = Sizes(build, found)
    seen = _given(build, found)
    rows = latent_rows(build, found, size, dtype, [] if seen is None else [_bias(build, seen, size, dtype)])
    pieces = absorbed_queries(build, found, dtype)
    if found.given:
        pieces.append(build(aten.new_ones.default, pieces[0], [size("b"), size("t"), sizes["h"], 1]))
    q = build.joined(pieces, -1)
    together = not same_size(sizes["t"], 1) and not (found.seen and found.seen[0].moves)
    if together:  # all queries see the same rows: as many heads of one
        q = build(aten.unsqueeze.default, build(aten.flatten.using_ints, q, 1, 2), 1)
    lengths = _lengths(build, found, size)
    if seen is not None:  # a sequence without any row has a result of 0, as torch's attention has it
        lengths = build(aten.mul.Tensor, lengths, build(aten.any.dim, seen, -1))
    op = build(torch.ops.megacpp.mla_decode.default, q, rows, lengths, None, None, core.scale, sizes["r"])
    out = build.item(op, 0)
    if together:
        out = build(aten.reshape.default, out, [size("b"), size("t"), sizes["h"], sizes["r"]])
    return op, [expanded_result(build, found, out, op, size, dtype, bool(found.seen or found.given))]


def _given(build: Builder, found: LatentAttention) -> Node | None:
    """[b or 1, s] of bool, which rows all queries see as far as data says so; None where it says nothing."""

    def seen(one: SeenRows) -> Node:
        axes = found.core.scores_axes[len(found.core.scores_axes) - value(one.node).dim() :]
        node = taken(build, one.node, [(axis if axis in "bs" else None, 0, None) for axis in axes], "bs")
        return build(aten.logical_not.default, node) if one.hidden else node

    return build.folded(aten.logical_and.default, map(seen, found.given))


def _bias(build: Builder, seen: Node, size: Callable[[str], Any], dtype: torch.dtype) -> Node:
    """[b, s, 1]: one more channel of the keys, which queries have 1 in: 0, or so low that a row has no weight."""
    options: dict[str, Any] = {"dtype": dtype, "device": value(seen).device}
    low = build(aten.full.default, [], max(LOW, torch.finfo(dtype).min), **options)
    bias = build(aten.where.self, seen, build(aten.full.default, [], 0.0, **options), low)
    return build(aten.unsqueeze.default, build(aten.expand.default, bias, [size("b"), size("s")]), -1)


def _lengths(build: Builder, found: LatentAttention, size: Callable[[str], Any]) -> Node:
    """[b]: how many rows are there, of which the newest query sees all."""
    device = value(found.latent.node).device
    options: dict[str, Any] = {"dtype": torch.int64, "device": device}
    if not found.seen:
        return build(aten.full.default, [size("b")], size("s"), **options)
    limits = [_limit(build, one, found, size, options) for one in found.seen]
    return build(aten.expand.default, build.folded(aten.minimum.default, limits), [size("b")])


def _limit(
    build: Builder, one: Seen, found: LatentAttention, size: Callable[[str], Any], options: dict[str, Any]
) -> Node:
    """[b] or [1]: the rows up to the last that the newest query sees."""
    number, parts = one.last.number + (0 if one.moves else 1), list(one.last.parts)
    if one.moves and isinstance(found.sizes["t"], int):
        number += found.sizes["t"]
    tensors = [(n, node) for n, node in parts if isinstance(value(node), torch.Tensor)]
    total = build(aten.full.default, [1], number, **options)
    for n, node in tensors:
        total = build(aten.add.Tensor, total, build(aten.reshape.default, node, [-1]), alpha=n)
    for n, node in parts:
        if not isinstance(value(node), torch.Tensor):
            total = build(aten.add.Tensor, total, node, alpha=n)
    if one.moves and not isinstance(found.sizes["t"], int):
        total = build(aten.add.Tensor, total, size("t"))
    return total
