"""The up-projections of an attention over latents, as the absorbed form has them: queries by W_uk, results by W_uv."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers.latent_attention.over_latents import LatentAttention, View
from megacpp_compile.matchers.latent_attention.up_projections import Times


def absorbed(build: Builder, q: Node, found: LatentAttention, dtype: torch.dtype) -> Node:
    """Queries [b, t, h, n] by W_uk: [b, t, h, r]."""
    made = []
    for one in found.w_uk:
        weight = _weight(build, one.weight, {"h": found.sizes["h"], "c": found.sizes["n"], "r": one.rank}, dtype)
        x = build(aten.einsum.default, "bthn,hnr->bthr", [q, weight])
        if one.down is not None:  # of so few channels that a sum of weights would take more
            down = _weight(build, one.down, {"c": one.rank, "r": found.sizes["r"]}, dtype)
            x = build(aten.einsum.default, "bthp,pr->bthr", [x, down])
        made.append((x, one.times))
    return _sum(build, made, dtype)


def expanded(
    build: Builder, x: Node, found: LatentAttention, dtype: torch.dtype, op: Node, of_queries: list[Any] | None
) -> Node:
    """Sums of latents [b, t, h, r] by W_uv, and the values' biases where a query sees a row: [b, t, h, v]. op: the
    attention; of_queries: the sizes b, t, h and 1, or None where there is no bias or every query sees a row."""
    heads, channels, made = found.sizes["h"], found.sizes["v"], []
    for one in found.w_uv:
        y = x
        if one.down is not None:
            down = _weight(build, one.down, {"c": one.rank, "r": found.sizes["r"]}, dtype)
            y = build(aten.einsum.default, "bthr,pr->bthp", [y, down])
        weight = _weight(build, one.weight, {"h": heads, "c": channels, "r": one.rank}, dtype)
        made.append((build(aten.einsum.default, "bthr,hvr->bthv", [y, weight]), one.times))
    for bias in found.biases:
        made.append((_weight(build, bias.view, {"h": heads, "c": channels}, value(bias.view.node).dtype), bias.times))
    out = _sum(build, made, dtype)
    if of_queries is None:
        return out
    none = build(aten.eq.Scalar, build.item(op, 1), -math.inf)
    return build(aten.masked_fill.Scalar, out, build(aten.reshape.default, none, of_queries), 0.0)


def _sum(build: Builder, terms: Sequence[tuple[Node, Times]], dtype: torch.dtype) -> Node:
    """Terms added up in float32 or wider and rounded once, to `dtype`."""
    if len(terms) == 1 and terms[0][1] == Times():
        return terms[0][0]
    wide, made = torch.promote_types(dtype, torch.float32), []
    for x, times in terms:
        numbers = [times.number] if times.number != 1 else []
        made.append(build.folded(aten.mul.Tensor, [build.cast(x, wide), *numbers, *times.nodes]))  # type: ignore[list-item]
    return build.cast(build.folded(aten.add.Tensor, made), dtype)  # type: ignore[arg-type]


def _weight(build: Builder, view: View, wanted: Mapping[str, int], dtype: torch.dtype) -> Node:
    """A weight, or constant, with the dimensions `wanted` and in their order: its own are taken apart into digits, of
    which each axis is one; of size 1 for an axis it does not have."""
    shape, kept = list[int](), list[tuple[str | None, int, Any]]()
    for whole, (first, steps) in zip(value(view.node).shape, view.places, strict=True):
        left = whole
        for axis, step in sorted(steps.items(), key=lambda one: -one[1]):
            shape.append(left // step)
            kept.append((axis, first // step, wanted[axis]))
            first, left = first % step, step
        if left > 1 or not steps:
            shape.append(left)
            kept.append((None, first, 1))
    node = view.node
    if shape != list(value(node).shape):
        node = build(aten.reshape.default, node, shape)
    return build.cast(taken(build, node, kept, "".join(wanted)), dtype)


def weights_fit(found: LatentAttention) -> bool:
    """Whether `_weight` can take all of them apart."""
    sizes = found.sizes
    for maps, channels in ((found.w_uk, sizes["n"]), (found.w_uv, sizes["v"])):
        for one in maps:
            if not _fits(one.weight, {"h": sizes["h"], "c": channels, "r": one.rank}):
                return False
            if one.down is not None and not _fits(one.down, {"c": one.rank, "r": sizes["r"]}):
                return False
    return all(_fits(one.view, {"h": sizes["h"], "c": sizes["v"]}, some=True) for one in found.biases)


def _fits(view: View, wanted: Mapping[str, int], some: bool = False) -> bool:
    """Whether `_weight` can take it apart. some: it may lack axes."""
    have, all_of = [axis for _, steps in view.places for axis in steps], {a for a, n in wanted.items() if n > 1}
    if len(set(have)) != len(have) or not set(have) <= all_of or not some and set(have) != all_of:
        return False
    for whole, (first, steps) in zip(value(view.node).shape, view.places, strict=True):
        left = whole
        for axis, step in sorted(steps.items(), key=lambda one: -one[1]):
            if step <= 0 or left % step or first // step + wanted[axis] > left // step:
                return False
            first, left = first % step, step
    return True


def taken(build: Builder, node: Node, dims: Sequence[tuple[str | None, int, Any]], axes: str) -> Node:
    """`node` with the dimensions `axes`, of size 1 where it has none. dims: of each of its own (the axis, the first
    place, how many); of one without an axis that place alone is taken."""
    for dim, (axis, first, size) in reversed([*enumerate(dims)]):
        node = build(aten.select.int, node, dim, first) if axis is None else build.part(node, dim, first, size)
    have = [axis for axis, _, _ in dims if axis is not None]
    node = build.permuted(node, [have.index(axis) for axis in axes if axis in have])
    return build.unsqueezed(node, [place for place, axis in enumerate(axes) if axis not in have])
