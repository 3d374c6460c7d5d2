"""Sums, and products with numbers and tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import EXPANSIONS, IDENTITIES, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.rope.lane_dims import align, as_lane, broadcast, select, widen, with_rank
from megacpp_compile.matchers.rope.lanes import (
    MAX_TERMS,
    NONE,
    SEVERAL,
    LaneContext,
    Lanes,
    Opaque,
    Term,
    axis_of,
    is_one,
    rule_table,
)
from megacpp_compile.matchers.rope.tables import table_lanes

RULES, rule, unary = rule_table()


@rule(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
def _add(it: LaneContext, node: Node) -> Lanes:
    a, b = node.args[:2]
    sign = -1.0 if node.target in (aten.sub.Tensor, aten.sub.Scalar) else 1.0
    alpha = sign * float(node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1))
    if not isinstance(b, Node):
        if b == 0:
            return it.get(a)
        raise Opaque
    return add_lanes(it, it.get(a), it.get(b), alpha)


def add_lanes(it: LaneContext, a: Lanes, b: Lanes, alpha: float) -> Lanes:
    Opaque.when(a.complex != b.complex)
    a, b = align(it, [a, b])
    sizes, (a, b) = broadcast([a, b])
    terms = [t for t in (*a.terms, *(t.scaled(alpha) for t in b.terms)) if t.coef.any()] or a.terms
    Opaque.when(len(terms) > MAX_TERMS)
    Opaque.when(  # a bias, or an adapter beside a projection: the sum is a source of its own
        not a.rotated and not b.rotated and (a.live & b.live).any()
    )
    return Lanes(a.kinds, sizes, terms, a.complex)


@unary(aten.sum.dim_IntList)
def _sum(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    """Of a row of a 2 x 2 matrix, the products with both lanes of a pair."""
    dims = node.args[1]
    Opaque.when(not isinstance(dims, (list, tuple)) or len(dims) != 1 or any(node.args[2:]) or node.kwargs or x.complex)
    dim = axis_of(dims[0], len(x.kinds))
    Opaque.when(not x.rotated or x.kinds[dim] != "l" or x.sizes[dim] * len(x.terms) > MAX_TERMS)
    parts = [select(x, dim, i) for i in range(x.sizes[dim])]
    return dataclasses.replace(parts[0], terms=[t for part in parts for t in part.terms])


@unary(aten.neg.default)
def _neg(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    return dataclasses.replace(x, terms=[t.scaled(-1.0) for t in x.terms])


@rule(aten.div.Tensor, aten.div.Scalar)
def _div(it: LaneContext, node: Node) -> Lanes:
    Opaque.when(not isinstance(node.args[1], (int, float)) or node.args[1] == 0)
    return _times_number(it, node, it.get(node.args[0]), 1.0 / node.args[1])


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(it: LaneContext, node: Node) -> Lanes:
    return _product(it, node, node.args[0], node.args[1])


def _times_number(it: LaneContext, node: Node, x: Lanes, number: float) -> Lanes:
    """x * number. Values that are scaled on their way to the rotation are a source of their own, unless that would keep
    them in a wider dtype than theirs."""
    Opaque.when(abs(number) != 1 and not x.rotated and not x.complex and it.dtypes(x) == {value(node).dtype})
    return dataclasses.replace(x, terms=[t.scaled(number) for t in x.terms])


def _product(it: LaneContext, node: Node, a: Any, b: Any) -> Lanes:
    if not isinstance(a, Node):
        a, b = b, a
    if not isinstance(b, Node):
        Opaque.when(not isinstance(b, (int, float)))
        return _times_number(it, node, it.get(a), float(b))
    if it.is_table(a):
        a, b = b, a
    Opaque.when(it.is_table(a) or not it.is_table(b))
    x, number = it.get(a), constant(b)
    if number is not None and all(map(same_size, value(node).shape, x.sizes)) and len(x.sizes) == value(node).dim():
        return _times_number(it, node, x, number)
    if x.rotated:
        it.met_again(a)
    return times_table(it, x, b)


def constant(table: Node) -> float | None:
    """The number that all entries of `table` are, such as 1 for the scale of rotations that have none."""
    if table.target in (aten.ones.default, aten.ones_like.default):
        return 1.0
    if table.target in (aten.full.default, aten.full_like.default):
        return number_of(table.args[1])
    if table.target is aten.pow.Tensor_Scalar and (base := constant(table.args[0])) is not None:  # type: ignore[arg-type]
        power = number_of(table.args[1])
        return base**power if base > 0 and power is not None else None
    if table.target is aten.reciprocal.default and (base := constant(table.args[0])):  # type: ignore[arg-type]
        return 1.0 / base
    same = is_cast(table) or table.target in _OF_THE_SAME_ENTRIES
    return constant(table.args[0]) if same else None  # type: ignore[arg-type]


_OF_THE_SAME_ENTRIES = RESHAPES | UNIT_DIMS | EXPANSIONS | IDENTITIES | {aten.slice.Tensor}


@rule(aten.addcmul.default)
def _addcmul(it: LaneContext, node: Node) -> Lanes:
    scale = float(node.kwargs.get("value", 1))
    return add_lanes(it, it.get(node.args[0]), _product(it, node, node.args[1], node.args[2]), scale)


def times_table(it: LaneContext, x: Lanes, table: Node) -> Lanes:
    """x * table: table entries that meet a lane of x become part of its terms."""
    fake = value(table)
    Opaque.when(not isinstance(fake, torch.Tensor) or fake.dim() == 0 or fake.is_complex() != x.complex)
    x = with_rank(it, x, fake.dim())
    if x.rotated:
        return _rotated_again(x, fake)
    x = _rows_of_matrices(it, x, fake)
    # A lane dimension of size 1 against a wider table dimension would mean the table widens the data.
    entries = table_lanes(it, table, x)
    shape = [s for s, k in zip(x.sizes, x.kinds, strict=True) if k == "l"]
    sizes = list(x.sizes)
    for i, n in enumerate(fake.shape):
        dim = len(sizes) - fake.dim() + i
        if is_one(sizes[dim]) and not is_one(n):
            Opaque.when(x.kinds[dim] == "l")
            sizes[dim] = n
    if not x.complex:
        e = entries[0].map(lambda a: np.broadcast_to(a, shape))
        terms = [_attach(t, e) for t in x.terms]
        return Lanes(x.kinds, tuple(sizes), terms)
    Opaque.when(len(x.terms) != 1)
    re, im = (e.map(lambda a: np.broadcast_to(a, shape)) for e in entries)
    xr, xi = (_complex_part(x.terms[0], p) for p in (0, 1))
    first = stack_parts(_attach(xr, re), _attach(xr, im))
    second = stack_parts(_attach(xi, im).scaled(-1.0), _attach(xi, re))
    return Lanes(x.kinds, tuple(sizes), [first, second], True)


def _rotated_again(x: Lanes, table: torch.Tensor) -> Lanes:
    """x, whose lanes have met a table, times another one, as xPos scales what it rotates."""
    offset = len(x.sizes) - table.dim()
    Opaque.when(x.complex or not all(is_one(n) or same_size(n, x.sizes[offset + i]) for i, n in enumerate(table.shape)))
    terms = [dataclasses.replace(t, tab=np.where(t.coef == 0, NONE, SEVERAL)) for t in x.terms]
    return dataclasses.replace(x, terms=terms)


def _rows_of_matrices(it: LaneContext, x: Lanes, table: torch.Tensor) -> Lanes:
    """x with each lane repeated along a dimension of size 1 behind its lanes, where `table` has several rows for it:
    those of a matrix that meets each pair of lanes (FLUX, Granite)."""
    for i, n in enumerate(table.shape):
        dim = len(x.sizes) - table.dim() + i
        if is_one(x.sizes[dim]) and isinstance(n, int) and n > 1 and "l" in x.kinds[:dim] and not x.complex:
            x = widen(x if x.kinds[dim] == "l" else as_lane(it, x, dim), dim, n)
    return x


def _complex_part(t: Term, part: int) -> Term:
    return t.map(lambda a: a[..., part])


def _attach(t: Term, e: Term) -> Term:
    """A term times a table entry (entry terms hold the table in src/lane)."""
    return Term(t.coef * e.coef, t.src, t.lane, np.where(t.coef == 0, NONE, e.src), np.where(t.coef == 0, NONE, e.lane))


def stack_parts(a: Term, b: Term) -> Term:
    return Term(*(np.stack((getattr(a, f.name), getattr(b, f.name)), -1) for f in dataclasses.fields(Term)))
