"""Runs of lanes put together: cat, stack, and writes into an empty tensor."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.filled import ZEROS
from megacpp_compile.matchers.rope.lane_dims import align, as_lane, insert_outer, pad_terms
from megacpp_compile.matchers.rope.lane_rules.views import bounds
from megacpp_compile.matchers.rope.lanes import (
    EMPTY,
    UNDEFINED,
    LaneContext,
    Lanes,
    Opaque,
    Term,
    axis_of,
    is_one,
    rule_table,
    term,
    zero_term,
)

RULES, rule, _ = rule_table()


def concat(values: list[Lanes], dim: int) -> Lanes:
    axis = values[0].axis(dim)
    columns = zip(*pad_terms(values), strict=True)
    terms = [
        Term(*(np.concatenate([getattr(t, f.name) for t in c], axis) for f in dataclasses.fields(Term)))
        for c in columns
    ]
    sizes = list(values[0].sizes)
    sizes[dim] = sum(v.sizes[dim] for v in values)
    return Lanes(values[0].kinds, tuple(sizes), terms, values[0].complex)


def is_zero(size: object) -> bool:
    """Whether a size is known to be 0."""
    return isinstance(size, int) and size == 0


@rule(aten.cat.default)
def _cat(it: LaneContext, node: Node) -> Lanes:
    rank = value(node).dim()
    along = axis_of(node.args[1] if len(node.args) > 1 else 0, rank)
    parts = [p for p in node.args[0] if value(p).dim() == rank and not is_zero(value(p).shape[along])]
    Opaque.when(not parts)
    values = align(it, [it.get(p) for p in parts])
    dim = axis_of(along, len(values[0].kinds))
    if values[0].kinds[dim] == "o" and all(is_one(v.sizes[dim]) for v in values):
        values = [as_lane(it, v, dim) for v in values]
    Opaque.when(values[0].kinds[dim] != "l" or len({v.complex for v in values}) != 1)
    return concat(values, dim)


@rule(aten.stack.default)
def _stack(it: LaneContext, node: Node) -> Lanes:
    values = [it.get(p) for p in node.args[0]]
    dim = axis_of(node.args[1] if len(node.args) > 1 else 0, len(values[0].kinds) + 1)
    values = [as_lane(it, insert_outer(it, v, dim), dim) for v in values]
    Opaque.when(len({v.kinds for v in values}) != 1)
    return concat(values, dim)


@rule(*EMPTY)
def _empty(it: LaneContext, node: Node) -> Lanes:
    fake = value(node)
    lanes = Opaque.unless(it.leaf(node))
    Opaque.when(not fake.is_floating_point())
    shape = lanes.terms[0].coef.shape
    if node.target in ZEROS:  # what is added to them is all there is
        return dataclasses.replace(lanes, terms=[zero_term(shape)])
    undefined = np.full(shape, UNDEFINED)
    return dataclasses.replace(lanes, terms=[term(np.ones(shape), UNDEFINED, undefined)])


@rule(aten.slice_scatter.default)
def _slice_scatter(it: LaneContext, node: Node) -> Lanes:
    base = it.get(node.args[0])
    part = it.get(node.args[1])
    dim, index, whole = bounds(node, 2, base.sizes)
    if whole:
        return part
    base, part = align(it, [base, part])
    Opaque.when(base.kinds[dim] != "l")
    base_terms, part_terms = pad_terms([base, part])
    key = (slice(None),) * base.axis(dim) + (index,)

    def write(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = a.copy()
        out[key] = b
        return out

    terms = [
        Term(*(write(getattr(b, f.name), getattr(p, f.name)) for f in dataclasses.fields(Term)))
        for b, p in zip(base_terms, part_terms, strict=True)
    ]
    return Lanes(base.kinds, base.sizes, terms, base.complex)
