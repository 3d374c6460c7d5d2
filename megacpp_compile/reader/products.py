"""Products of tensors in one op, in any spelling: which dimension of a factor is which of the result."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import of_tensors, value

CONTRACTED, BROADCAST = -1, -2  # in the place of a dimension of the result; further contracted ones are -3, -4, ...
_MATMULS = {aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default}


class Equation(NamedTuple):
    """terms: a letter for each dimension of each operand; out: those of the result."""

    operands: tuple[Node, ...]
    terms: tuple[Any, ...]
    out: Any


@dataclasses.dataclass(frozen=True)
class Factor:
    """An operand. dims: for each of its dimensions that of the result, CONTRACTED, or BROADCAST for one of size 1."""

    node: Node
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Product:
    """`node`, the product of factors, summed over the contracted dimensions, and `bias`, where it is added."""

    node: Node
    factors: tuple[Factor, ...]
    bias: Node | None = None


@or_none
def product_of(node: Node, biased: bool = False) -> Product | None:
    """The product of two factors, summed over one dimension of both, that `node` is, or None. biased: it may have a
    bias [channels]."""
    found = NoMatch.unless(contraction(node))
    NoMatch.when(len(found.factors) != 2 or any(CONTRACTED not in f.dims for f in found.factors))
    NoMatch.when(any(d < BROADCAST for f in found.factors for d in f.dims))
    NoMatch.when(node.target in _MATMULS and any(len(f.dims) < 2 for f in found.factors))
    return found if found.bias is None or biased and value(found.bias).dim() == 1 else None


def contraction(node: Node) -> Product | None:
    """The product that `node`, one op, is, or None."""
    if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return None
    equation, args = equation_of(node), node.args
    if equation is not None:
        return _product(node, equation)
    if node.target in _MATMULS:
        return _product(node, _matmul(node, *args[:2]))
    if node.target is aten.linear.default and value(args[1]).dim() == 2:
        x, w, bias = [*args, None][:3]
        rows = range(value(node).dim() - 1)
        return _product(node, Equation((x, w), ((*rows, "k"), ("j", "k")), (*rows, "j")), bias)  # type: ignore[arg-type]
    if node.target in (aten.addmm.default, aten.baddbmm.default) and not node.kwargs:
        return _product(node, _matmul(node, *args[1:3]), args[0])
    return None


def multiplied(node: Node | None) -> list[tuple[Node, Node]]:
    """(a, b) and (b, a) where `node` multiplies tensors a and b, element by element; none where it does not."""
    if node is None or node.target is not aten.mul.Tensor or not of_tensors(node):
        return []
    a, b = node.args
    return [(a, b), (b, a)]  # type: ignore[list-item]


@or_none
def equation_of(node: Node) -> Equation | None:
    """The equation of the product that `node` is by an equation: `einsum`, and `tensordot`, which has one."""
    if node.target is aten.tensordot.default:
        return _tensordot(node)
    NoMatch.when(node.target is not aten.einsum.default)
    equation, operands = node.args[:2]
    NoMatch.when(not isinstance(equation, str) or "->" not in equation or "." in equation)
    given, out = equation.replace(" ", "").split("->")
    return Equation(tuple(operands), tuple(given.split(",")), out)  # type: ignore[arg-type]


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


def _matmul(node: Node, a: Any, b: Any) -> Equation:
    """The product of rows "i" with columns "j", or a vector, over "k"; dimensions before these are aligned at the
    last."""
    n, m = value(a).dim(), value(b).dim()
    outer = range(value(node).dim() - (n > 1) - (m > 1))
    left, right = (outer[len(outer) - max(rank - 2, 0) :] for rank in (n, m))
    rows, columns = ["i"] * (n > 1), ["j"] * (m > 1)
    return Equation((a, b), ((*left, *rows, "k"), (*right, "k", *columns)), (*outer, *rows, *columns))


def _product(node: Node, equation: Equation, bias: Any = None) -> Product | None:
    operands, terms, out = equation
    if any(len(set(term)) != len(term) for term in (*terms, out)):
        return None
    gone = dict.fromkeys(letter for term in terms for letter in term if letter not in out)
    places: dict[Hashable, int] = {letter: i for i, letter in enumerate(out)}
    places |= {letter: CONTRACTED if i == 0 else BROADCAST - i for i, letter in enumerate(gone)}
    factors = [Factor(operand, _dims(node, operand, [places[letter] for letter in term]))
               for operand, term in zip(operands, terms, strict=True)]  # fmt: skip
    return Product(node, tuple(factors), bias)


def _dims(node: Node, operand: Node, places: Sequence[int]) -> tuple[int, ...]:
    """`places` of the operand's dimensions, with BROADCAST for those that are repeated."""
    sizes = [1 if place < 0 else value(node).shape[place] for place in places]
    both = zip(places, value(operand).shape, sizes, strict=True)
    return tuple(BROADCAST if _is_one(n) and not _is_one(size) else place for place, n, size in both)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
