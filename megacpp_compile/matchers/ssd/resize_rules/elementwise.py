"""Elementwise ops, casts, constants and triangles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import argument, same_size, value
from megacpp_compile.fx.views import SAME_VALUES
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, flat, fresh, length, pin
from megacpp_compile.matchers.ssd.tensor_ops import (
    CREATION,
    ELEMENTWISE,
    LIKE,
    MASKS,
    ResizeContext,
    broadcast,
    rule_table,
)

RULES, rule = rule_table()


@rule(*ELEMENTWISE)
def _elementwise(r: ResizeContext, n: Node) -> list[Dim]:
    return broadcast(r, [r.dims[a] for a in n.all_input_nodes])


@rule(*MASKS)
def _masks(r: ResizeContext, n: Node) -> list[Dim]:
    if any(not isinstance(a, Node) and a not in (0, 1, -1) for a in n.args):
        pin(d for a in n.all_input_nodes for d in r.dims[a])
    wide = [[d for d in r.dims[a] if flat(d)] for a in n.all_input_nodes]
    dims = _elementwise(r, n)
    if len(wide) == 2 and len(wide[0]) == len(wide[1]) == 1 and len([d for d in dims if flat(d)]) == 2:
        one_kind(r, wide[0][0], wide[1][0])
    return dims


def one_kind(r: ResizeContext, a: Dim, b: Dim) -> None:
    """A triangle compares the positions of two dimensions: they are one, where they are as long as each other."""
    if same_size(length(a), length(b)):
        r.axes.same(a, b)


def _float(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Any:
    return args[0].double() if value(n).is_floating_point() else args[0].to(value(n).dtype)


@rule(*SAME_VALUES, run=_float)
def _same(r: ResizeContext, n: Node) -> list[Dim]:
    return r.dims[n.args[0]]


def _create(r: ResizeContext, n: Node, args: tuple[Any, ...]) -> Tensor:
    fake, shape = value(n), r.shape(r.dims[n])
    dtype = torch.float64 if fake.is_floating_point() else fake.dtype
    if n.target in (aten.arange.default, aten.arange.start):
        first = n.args[0] if n.target is aten.arange.start else 0
        return torch.arange(shape[0], dtype=dtype, device="cpu") + first  # type: ignore[operator]
    if n.target is aten.eye.default:
        return torch.eye(shape[0], dtype=dtype, device="cpu")
    fill = argument(n, 1, "fill_value")
    if n.target in (aten.new_full.default,):
        fill = argument(n, 2, "fill_value")
    if n.target is aten.scalar_tensor.default:
        fill = n.args[0]
    if "ones" in str(n.target):
        fill = 1
    elif "zeros" in str(n.target):
        fill = 0
    elif "empty" in str(n.target):
        fill = math.nan  # whatever is not written over shows
    NoAxes.when(not isinstance(fill, (bool, int, float)), "a constant that is no number")
    return torch.full(shape, fill, dtype=dtype, device="cpu")


@rule(*CREATION, run=_create)
def _creation(r: ResizeContext, n: Node) -> list[Dim]:
    NoAxes.when(
        n.target is aten.arange.start and not isinstance(n.args[0], int), "positions that do not begin at a number"
    )
    if n.target is aten.eye.default:
        return [fresh(value(n).shape[0])] * 2
    return [fresh(s) for s in value(n).shape]


@rule(*LIKE, run=_create)
def _like(r: ResizeContext, n: Node) -> list[Dim]:
    return r.dims.get(n.args[0]) or [fresh(s) for s in value(n).shape]


@rule(aten.tril.default, aten.triu.default)
def _triangle(r: ResizeContext, n: Node) -> list[Dim]:
    dims = r.dims[n.args[0]]
    if argument(n, 1, "diagonal", 0) not in (-1, 0, 1):
        pin(dims[-2:])
    one_kind(r, *dims[-2:])
    return dims
