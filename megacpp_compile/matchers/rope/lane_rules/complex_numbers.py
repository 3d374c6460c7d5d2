"""Pairs of lanes as complex numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.matchers.rope.lane_dims import align
from megacpp_compile.matchers.rope.lane_rules.arithmetic import stack_parts
from megacpp_compile.matchers.rope.lanes import LaneContext, Lanes, Opaque, rule_table

RULES, rule, unary = rule_table()


@unary(aten.view_as_complex.default)
def _view_as_complex(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    Opaque.when(x.kinds[-1] != "l" or x.sizes[-1] != 2)
    return Lanes(x.kinds[:-1], x.sizes[:-1], x.terms, True)


@rule(aten.complex.default)
def _complex(it: LaneContext, node: Node) -> Lanes:
    re, im = align(it, [it.get(node.args[0]), it.get(node.args[1])])
    Opaque.when(len(re.terms) != 1 or len(im.terms) != 1)
    return Lanes(re.kinds, re.sizes, [stack_parts(re.terms[0], im.terms[0])], True)


@unary(aten.view_as_real.default)
def _view_as_real(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    Opaque.when(not x.complex)
    return Lanes(x.kinds + "l", (*x.sizes, 2), x.terms)


@unary(aten.real.default, aten.imag.default)
def _part(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    Opaque.when(not x.complex)
    part = 0 if node.target is aten.real.default else 1
    return Lanes(x.kinds, x.sizes, x.map(lambda a: a[..., part]))


@unary(aten._conj.default, aten.conj.default)
def _conj(it: LaneContext, node: Node, x: Lanes) -> Lanes:
    Opaque.when(not x.complex)
    sign = np.array([1.0, -1.0])
    return dataclasses.replace(x, terms=[dataclasses.replace(t, coef=t.coef * sign) for t in x.terms])
