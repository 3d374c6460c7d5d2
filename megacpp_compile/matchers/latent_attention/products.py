"""Products of two tensors that contract one dimension, in any spelling: which dimension of an operand is which."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.equations import Equation, equation_of
from megacpp_compile.matchers.linear import match_linear

aten = torch.ops.aten
CONTRACTED, BROADCAST = -1, -2  # in the place of a dimension of the result


@dataclasses.dataclass(frozen=True)
class Factor:
    """An operand. dims: for each of its dimensions that of the result, CONTRACTED, or BROADCAST for one of size 1."""

    node: Node
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Product:
    """`node`, the sum over the contracted dimension of the product of two factors."""

    node: Node
    factors: tuple[Factor, Factor]


def product_of(node: Node) -> Product | None:
    """The product that `node` is, or None."""
    product, bias = with_bias(node)
    return product if bias is None else None


def with_bias(node: Node) -> tuple[Product | None, Node | None]:
    """(the product that `node` is, but for what it adds to the last dimension; that, [channels], or None)."""
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return None, None
    equation = equation_of(node)
    if equation is not None:
        return _by_equation(node, equation), None
    if node.target in (aten.matmul.default, aten.mm.default, aten.bmm.default):
        return _matmul(node), None
    linear = match_linear(node)
    if linear is None:
        return None, None
    last = value(node).dim() - 1
    x, w = (*range(last), CONTRACTED), ((CONTRACTED, last) if linear.transposed else (last, CONTRACTED))
    return Product(node, (Factor(linear.x, x), Factor(linear.w, w))), linear.b


def _matmul(node: Node) -> Product | None:
    a, b = node.args[:2]
    if not (isinstance(a, Node) and isinstance(b, Node)) or value(a).dim() < 2 or value(b).dim() < 2:
        return None
    last = value(node).dim() - 1
    left, right = (*_outer(a, node), last - 1, CONTRACTED), (*_outer(b, node), CONTRACTED, last)
    return Product(node, (Factor(a, left), Factor(b, right)))


def _outer(operand: Node, node: Node) -> tuple[int, ...]:
    sizes, whole = value(operand).shape[:-2], value(node).shape
    first = len(whole) - 2 - len(sizes)
    dims = range(first, first + len(sizes))
    return tuple(BROADCAST if _is_one(n) and not _is_one(whole[d]) else d for d, n in zip(dims, sizes, strict=True))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _by_equation(node: Node, equation: Equation) -> Product | None:
    operands, terms, out = equation
    contracted = {letter for term in terms for letter in term if letter not in out}
    if len(contracted) != 1 or any(len(set(term)) != len(term) or contracted.isdisjoint(term) for term in terms):
        return None
    factors = []
    for operand, term in zip(operands, terms, strict=True):
        sizes = value(operand).shape
        dims = tuple(CONTRACTED if s in contracted else out.index(s) for s in term)
        whole = value(node).shape
        widened = [d >= 0 and _is_one(n) and not _is_one(whole[d]) for d, n in zip(dims, sizes, strict=True)]
        factors.append(Factor(operand, tuple(BROADCAST if w else d for w, d in zip(widened, dims, strict=True))))
    return Product(node, (factors[0], factors[1]))
