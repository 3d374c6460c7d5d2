"""Lanes with dimensions inserted, dropped, permuted, reshaped, aligned and broadcast: what the rules share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from megacpp_compile.fx.edit import same_size
from megacpp_compile.matchers.rope.lanes import LaneContext, Lanes, Opaque, Term, is_one, zero_term


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
        if is_one(x.sizes[dim]):
            x = drop(it, x, dim)
    want = [s for s in new if not is_one(s)]
    kinds, shape, i = "", [], 0
    j = 0
    while j < len(want):
        if i < len(x.sizes) and same_size(x.sizes[i], want[j]):
            kinds += x.kinds[i]
            if x.kinds[i] == "l":
                shape.append(want[j])
            i, j = i + 1, j + 1
            continue
        # A group of lane dimensions with the same product on both sides.
        a, b, have, need = i, j, 1, 1
        while True:
            if have <= need and a < len(x.sizes) and x.kinds[a] == "l":
                have *= x.sizes[a]
                a += 1
            elif need < have and b < len(want) and isinstance(want[b], int):
                need *= want[b]
                b += 1
            else:
                raise Opaque
            if have == need:
                break
        Opaque.when(  # heads, not pairs of lanes: the result is a tensor of its own
            not _pairs(x.sizes[i:a]) and not _pairs(want[j:b])
        )
        kinds += "l" * (b - j)
        shape += want[j:b]
        i, j = a, b
    Opaque.when(i != len(x.sizes))
    Opaque.when("l" not in kinds)
    tail = [2] if x.complex else []
    y = Lanes(kinds, tuple(want), x.map(lambda a: a.reshape(*shape, *tail)), x.complex)
    for dim, size in enumerate(new):
        if is_one(size):
            y = insert_outer(it, y, dim)
    return y


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
