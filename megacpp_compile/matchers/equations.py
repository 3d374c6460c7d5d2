"""Which dimension of an operand is which, of products by an equation: `einsum`, and `tensordot`, which has one."""

from __future__ import annotations

import string
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value

aten = torch.ops.aten


class Equation(NamedTuple):
    """terms: a letter for each dimension of each operand; out: those of the result."""

    operands: tuple[Node, Node]
    terms: tuple[str, str]
    out: str


def equation_of(node: Node) -> Equation | None:
    """The equation of the product of two tensors that `node` is, or None."""
    if node.target is aten.tensordot.default:
        return _tensordot(node)
    if node.target is not aten.einsum.default:
        return None
    equation, operands = node.args[:2]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(operands) != 2:  # type: ignore[arg-type]
        return None
    given, out = equation.replace(" ", "").split("->")
    first, second = given.split(",")
    return Equation(tuple(operands), (first, second), out)  # type: ignore[arg-type]


def _tensordot(node: Node) -> Equation | None:
    a, b, dims, others, *_ = node.args
    ranks: list[Any] = [value(a).dim(), value(b).dim()]
    if sum(ranks) > len(string.ascii_letters) or node.kwargs or len(node.args) > 4:
        return None
    letters = [*string.ascii_letters[: sum(ranks)]]
    first, second = letters[: ranks[0]], letters[ranks[0] :]
    for d, e in zip(dims, others, strict=True):  # type: ignore[arg-type]
        second[e] = first[d]
    summed = {first[d] for d in dims}  # type: ignore[union-attr]
    out = [letter for letter in (*first, *second) if letter not in summed]
    return Equation((a, b), ("".join(first), "".join(second)), "".join(out))  # type: ignore[arg-type]
