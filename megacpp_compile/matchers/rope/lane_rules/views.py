"""Views, copies and casts."""

from __future__ import annotations

import dataclasses
import operator
from functools import partial
from typing import Any

import numpy as np
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import CASTS, EXPANSIONS, IDENTITIES, PERMUTATIONS, REPETITIONS, RESHAPES, SQUEEZES
from megacpp_compile.matchers.rope.lane_dims import drop, insert_outer, permute, reshape, select, take, widen, with_rank
from megacpp_compile.matchers.rope.lanes import LaneContext, Lanes, Opaque, axis_of, is_one, precision, rule_table
from megacpp_compile.reader.dims import permutation, repetition
from megacpp_compile.reader.parts import part_of

RULES, rule, unary = rule_table()


@rule(*IDENTITIES)
def _same(it: LaneContext, node: Node) -> Lanes:
    Opaque.when(not value(node).is_floating_point())
    return it.get(node.args[0])


@unary(*CASTS)
def _cast(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    """Values rounded on their way to the rotation, such as a norm's that computes in float32, are a source of their
    own: what the rotation reads is the rounded value."""
    dtype = value(node).dtype
    Opaque.when(not value(node).is_floating_point())
    scaled = precision(dtype) < precision(value(node.args[0]).dtype) and x.scaled
    Opaque.when(not x.rotated and (scaled or any(precision(source) > precision(dtype) for source in it.dtypes(x))))
    return x


@rule(operator.getitem, aten.select.int, aten.slice.Tensor)
def _part(it: LaneContext, node: Node) -> Lanes:
    part = Opaque.unless(part_of(node))
    x, start, size, step = it.get(part.source), part.start, part.size, part.step
    if not part.kept:
        return select(x, part.dim, start)
    if same_size(size, part.whole):
        return x
    Opaque.when(x.kinds[part.dim] != "l" or not all(isinstance(n, int) for n in (start, size, step)))
    return take(x, part.dim, slice(start, start + size * step, step))


def bounds(node: Node, first: int, sizes: tuple[Any, ...]) -> tuple[int, slice, bool]:
    """(dim, range, whether the range is everything) of slice-like arguments from position `first` on."""
    args = [*node.args[first:], *(None,) * 4][:4]
    dim = axis_of(args[0] or 0, len(sizes))
    start, end, step = args[1], args[2], args[3] or 1
    whole = start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= 1 << 62))
    if not whole and start in (None, 0) and step == 1:
        whole = same_size(value(end) if isinstance(end, Node) else end, sizes[dim])
    Opaque.when(not whole and not all(isinstance(v, int) or v is None for v in (start, end, step)))
    return dim, slice(start, end, step), whole


@unary(aten.flip.default)
def _flip(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    for d in node.args[1]:
        dim = axis_of(d, len(x.kinds))
        Opaque.when(x.kinds[dim] != "l")
        axis = x.axis(dim)
        x = dataclasses.replace(x, terms=x.map(partial(np.flip, axis=axis)))
    return x


@unary(aten.roll.default)
def _roll(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    shifts, dims = node.args[1], node.args[2] if len(node.args) > 2 else []
    shifts = [shifts] if isinstance(shifts, int) else shifts
    Opaque.when(len(shifts) != len(dims))
    for shift, d in zip(shifts, dims, strict=True):
        dim = axis_of(d, len(x.kinds))
        Opaque.when(x.kinds[dim] != "l")
        axis = x.axis(dim)
        x = dataclasses.replace(x, terms=x.map(partial(np.roll, shift=shift, axis=axis)))
    return x


@unary(*PERMUTATIONS)
def _transpose(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    return permute(it, x, permutation(node) or [])


@unary(aten.unsqueeze.default)
def _unsqueeze(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    return insert_outer(it, x, axis_of(node.args[1], len(x.kinds) + 1))


@unary(*SQUEEZES)
def _squeeze(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    n = len(x.kinds)
    dims = node.args[1] if len(node.args) > 1 else range(n)
    dims = [dims] if isinstance(dims, int) else dims
    for dim in sorted({axis_of(d, n) for d in dims}, reverse=True):
        if is_one(x.sizes[dim]):
            x = drop(it, x, dim)
    return x


@unary(*EXPANSIONS, *REPETITIONS)
def _repeat(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    times, _ = Opaque.unless(repetition(node))
    x = with_rank(it, x, len(times))
    for dim, n in enumerate(times):
        if x.kinds[dim] == "l" and not is_one(n):
            Opaque.when(not isinstance(n, int) or node.target is aten.repeat.default)
            x = widen(x, dim, n)
        Opaque.when(node.target in REPETITIONS and x.kinds[dim] == "o" and not is_one(n) and not is_one(x.sizes[dim]))
    return Lanes(x.kinds, tuple(value(node).shape), x.terms, x.complex)


@unary(*RESHAPES)
def _view(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    return reshape(it, x, tuple(value(node).shape))
