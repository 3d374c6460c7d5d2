"""Matches an expert by its last GEMM, a contraction with the weights of all experts, or with each row's own copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_shape, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.experts import Expert, expert_ending_in
from megacpp_compile.matchers.moe.factors import Axis, Dims, Factor, beneath, broadcast, factors, longer_dims, over
from megacpp_compile.matchers.moe.gemms import Gemm, adds_up
from megacpp_compile.matchers.moe.route_axes import RouteAxes
from megacpp_compile.matchers.moe.stacked_gemms import StackedGemms, is_biased_product, product_of

aten = torch.ops.aten
NEGATIVE = "an expert's number may be negative, which would count from the end"


@dataclasses.dataclass(frozen=True)
class GatheredExpert:
    """`expert` with the weights of all experts, of which every row takes those that `ids` says, or where these are None
    all; `gate`: what multiplies what it reads."""

    expert: Expert
    ids: Node | None
    gate: Factor | None


def expert_behind(
    axes: RouteAxes, weight: Factor, hidden: Factor, out: Axis, added: Factor | None = None, again: bool = False
) -> GatheredExpert | MatchFailure | None:
    """The expert whose last GEMM multiplies `hidden` by `weight`, and may be `added` to. again: see `StackedGemms`."""
    *_, (inner, dims) = beneath(hidden)
    (channels,) = hidden.axes - axes.both
    if dims[-1] != (channels,):
        return None
    match_gemm = StackedGemms(axes, [d for d in dims[:-1] if d], again)
    found = match_gemm.weight(weight, out, channels)
    if found is None:
        return None
    bias = None if added is None else match_gemm.bias(added, out)
    if added is not None and bias is None:
        return MatchFailure(added.by, "bias", "what is added to an expert's projection is no bias of its own")
    summed = weight.by if added is None else added.by
    expert = expert_ending_in(Gemm(summed, inner, found, bias, value(weight.by).dtype), match_gemm)
    if isinstance(expert, MatchFailure):
        return expert
    if match_gemm.mixed is not None:
        return MatchFailure(match_gemm.mixed, "indices", "an expert's projections go by different choices")
    return GatheredExpert(expert, match_gemm.ids, match_gemm.gate)


def biased_gemms(
    inner: Node, dims: Dims, out: Axis, routes: tuple[Axis, ...]
) -> Iterator[tuple[Factor, Factor, Factor] | MatchFailure]:
    """(weight, rows, bias) of every way in which `inner` is the sum of a GEMM and a bias."""
    sums: list[tuple[Any, Any]] = []
    if is_biased_product(inner):
        sums = [(inner, inner.args[0])]
    elif inner.target is aten.add.Tensor and of_tensors(inner) and not inner.kwargs:
        sums = [inner.args, inner.args[::-1]]  # type: ignore[list-item]
    for side, other in sums:
        if not same_shape(side, inner):
            continue
        parts = product_of(side, dims) or factors(side, dims, lambda below: out in below and below.issuperset(routes))
        if (split := _split(parts, out)) is not None:
            if not adds_up(side, inner):
                yield MatchFailure(inner, "bias", "an expert's bias is wider than what it is added to")
                return
            yield *split, Factor(other, broadcast(other, dims), inner)


def _split(parts: list[Factor], out: Axis) -> tuple[Factor, Factor] | None:
    """(weight, rows) of a product of two, of which the weight alone runs over `out`."""
    weights = [p for p in parts if out in p.axes]
    if len(parts) != 2 or len(weights) != 1:
        return None
    return weights[0], next(p for p in parts if p is not weights[0])


def expert_of(node: Node) -> GatheredExpert | MatchFailure | None:
    """The expert that makes `node` of rows with each one's own weights, one for each row."""
    whole = Factor(node, over(node), node)
    *outer, last = longer_dims(whole.dims) or ((),)
    if len(last) != 1 or not value(node).is_floating_point():
        return None
    (out,), axes = last, RouteAxes(tuple(a for d in outer for a in d), ())
    for inner, dims in beneath(whole):
        plain = _split(factors(inner, dims, lambda below: out in below), out)
        for parts in (*biased_gemms(inner, dims, out, ()), *([(*plain, None)] if plain is not None else [])):
            if isinstance(parts, MatchFailure):
                return parts
            weight, hidden, added = parts
            if len(hidden.axes - axes.both) == 1:
                if (found := expert_behind(axes, weight, hidden, out, added, again=True)) is not None:
                    return found
    return None
