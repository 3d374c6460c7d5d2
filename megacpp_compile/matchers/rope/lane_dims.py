"""Lanes with dimensions inserted, dropped, permuted, reshaped, aligned and broadcast: what the rules share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from megacpp_compile.fx.edit import same_size
from megacpp_compile.matchers.rope.lanes import LaneContext, Lanes, Opaque, Term, is_one, zero_term
from megacpp_compile.reader.dims import regrouped


def take(x: Lanes, dim: int, index: slice) -> Lanes:
    key = (slice(None),) * x.axis(dim) + (index,)
    terms = x.map(lambda a: a[key])
    size = len(range(*index.indices(x.sizes[dim])))
    return Lanes(x.kinds, (*x.sizes[:dim], size, *x.sizes[dim + 1 :]), terms, x.complex)


def select(x: Lanes, dim: int, index: Any) -> Lanes:
    Opaque.when(x.kinds[dim] != "l" or not isinstance(index, int))
    key = (slice(None),) * x.axis(dim) + (index,)
    kinds, sizes = x.kinds[:dim] + x.kinds[dim + 1 :], (*x.sizes[:dim], *x.sizes[dim + 1 :])
    return Lanes(kinds, sizes, x.map(lambda a: a[key]), x.complex)


def permute(it: LaneContext, x: Lanes, order: list[int]) -> Lanes:
    outer_order = [x.outer(d) for d in order if x.kinds[d] == "o"]
    axes = [x.axis(d) for d in order if x.kinds[d] == "l"]
    tail = [len(axes)] if x.complex else []
    y = Lanes("".join(x.kinds[d] for d in order), tuple(x.sizes[d] for d in order), x.terms, x.complex)
    if axes != sorted(axes):
        y.terms = y.map(lambda a: a.transpose(*axes, *tail))
    if outer_order != sorted(outer_order):
        y.terms = it.redim(y, lambda dims: tuple(dims[i] for i in outer_order))
    return y


def insert_outer(it: LaneContext, x: Lanes, dim: int) -> Lanes:
    at = x.outer(dim)
    terms = it.redim(x, lambda dims: (*dims[:at], -1, *dims[at:]))
    return Lanes(x.kinds[:dim] + "o" + x.kinds[dim:], (*x.sizes[:dim], 1, *x.sizes[dim:]), terms, x.complex)


def with_rank(it: LaneContext, x: Lanes, rank: int) -> Lanes:
    """`x` with as many dimensions of size 1 in front as `rank` asks for."""
    return functools.reduce(lambda made, _: insert_outer(it, made, 0), range(rank - len(x.kinds)), x)


def drop(it: LaneContext, x: Lanes, dim: int) -> Lanes:
    """`x` without dimension `dim` of size 1."""
    kinds, sizes = x.kinds[:dim] + x.kinds[dim + 1 :], (*x.sizes[:dim], *x.sizes[dim + 1 :])
    if x.kinds[dim] == "l":
        axis = x.axis(dim)
        return Lanes(kinds, sizes, x.map(lambda a: np.squeeze(a, axis)), x.complex)
    at = x.outer(dim)
    return Lanes(kinds, sizes, it.redim(x, lambda dims: (*dims[:at], *dims[at + 1 :])), x.complex)


def reshape(it: LaneContext, x: Lanes, new: tuple[Any, ...]) -> Lanes:
    """`x` in shape `new`, which inserts or drops dimensions of size 1, or splits and merges lane dimensions."""
    for dim in reversed(range(len(x.kinds))):
        if same_size(x.sizes[dim], 1):
            x = drop(it, x, dim)
    kinds, kept = "", list[int]()
    for own, made in Opaque.unless(regrouped(x.sizes, new)):
        sizes = [x.sizes[d] for d in own], [new[d] for d in made]
        if len(own) != 1 or len(made) != 1 or not same_size(*sizes[0], *sizes[1]):
            lanes = {x.kinds[d] for d in own} == {"l"} and all(isinstance(n, int) for n in sizes[1])
            Opaque.when(not lanes or not any(map(_pairs, sizes)))  # heads, not pairs: a tensor of its own
        kinds += x.kinds[own[0]] * len(made)
        kept += made
    Opaque.when("l" not in kinds)
    want = [new[d] for d in kept]
    shape = [*(n for n, kind in zip(want, kinds, strict=True) if kind == "l"), *[2] * x.complex]
    y = Lanes(kinds, tuple(want), x.map(lambda a: a.reshape(shape)), x.complex)
    return functools.reduce(functools.partial(insert_outer, it), (d for d in range(len(new)) if d not in kept), y)


def _pairs(sizes: Any) -> bool:
    """Dimensions that spell pairs of lanes: (d/2, 2) or (2, d/2)."""
    return len(sizes) == 2 and 2 in sizes


def align(it: LaneContext, values: list[Lanes]) -> list[Lanes]:
    """Bring values to the same number and kinds of dimensions, as broadcasting does."""
    n = max(len(v.kinds) for v in values)
    out = [with_rank(it, v, n) for v in values]
    for dim in range(n):
        kinds = {v.kinds[dim] for v in out}
        if len(kinds) == 2:
            out = [as_lane(it, v, dim) if v.kinds[dim] == "o" else v for v in out]
    return out


def as_lane(it: LaneContext, v: Lanes, dim: int) -> Lanes:
    Opaque.when(not is_one(v.sizes[dim]))
    v = drop(it, v, dim)
    axis = v.axis(dim)
    kinds, sizes = v.kinds[:dim] + "l" + v.kinds[dim:], (*v.sizes[:dim], 1, *v.sizes[dim:])
    return Lanes(kinds, sizes, v.map(lambda a: np.expand_dims(a, axis)), v.complex)


def widen(x: Lanes, dim: int, n: int) -> Lanes:
    """`x` with its lane dimension `dim` of size 1 repeated `n` times."""
    axis = x.axis(dim)
    terms = x.map(lambda a: np.repeat(a, n, axis))
    return Lanes(x.kinds, (*x.sizes[:dim], n, *x.sizes[dim + 1 :]), terms, x.complex)


def broadcast(values: list[Lanes]) -> tuple[tuple[Any, ...], list[Lanes]]:
    sizes = []
    for column in zip(*(v.sizes for v in values), strict=True):
        size = next((s for s in column if not is_one(s)), 1)
        Opaque.when(any(not is_one(s) and not same_size(s, size) for s in column))
        sizes.append(size)
    shape = [s for s, k in zip(sizes, values[0].kinds, strict=True) if k == "l"]
    tail = [2] if values[0].complex else []
    out = []
    for v in values:
        terms = v.map(lambda a: np.broadcast_to(a, (*shape, *tail)))
        out.append(Lanes(v.kinds, tuple(sizes), terms, v.complex))
    return tuple(sizes), out


def pad_terms(values: list[Lanes]) -> list[list[Term]]:
    count = max(len(v.terms) for v in values)
    return [[*v.terms, *(zero_term(v.terms[0].coef.shape) for _ in range(count - len(v.terms)))] for v in values]
