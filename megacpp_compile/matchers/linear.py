"""`x @ w.T + b` however it is spelled: linear, matmul, mm, addmm, einsum, tensordot; and with the weight of each head
apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.views import PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.reader.dims import permutation
from megacpp_compile.reader.links import through
from megacpp_compile.reader.products import Equation, equation_of


@dataclasses.dataclass(frozen=True)
class Linear:
    """`node = x @ w.T + b`, w [out, in]; with `transposed`, the tensor in `w` is the weight as [in, out]."""

    node: Node
    x: Node
    w: Node
    b: Node | None
    transposed: bool = False

    def weight(self, build: Builder) -> Node:
        """The weight as [out, in], in the dtype the product is computed in (autocast casts it silently)."""
        w = build(aten.t.default, self.w) if self.transposed else self.w
        return build.cast(w, value(self.node).dtype)

    @property
    def out_features(self) -> int:
        return value(self.w).shape[1 if self.transposed else 0]

    def shaped(self, build: Builder, out: Node) -> Node:
        """`out`, which has a last dimension of `out_features`, in the shape of `node`."""
        return out


@dataclasses.dataclass(frozen=True)
class ByHeads(Linear):
    """`node = einsum("bsr,hdr->bhsd", x, w)`: a linear by a weight that keeps heads apart.

    first: w's dimensions, those of the outputs in front; gone: x's dimensions of size 1 that `node` is without;
    order: the dimensions of `node` among those that x keeps and those of the outputs.
    """

    first: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def weight(self, build: Builder) -> Node:
        w = build.permuted(self.w, self.first)
        w = build(aten.reshape.default, w, [-1, value(self.w).shape[self.first[-1]]])
        return build.cast(w, value(self.node).dtype)

    @property
    def out_features(self) -> int:
        shape = value(self.w).shape
        return math.prod(shape[d] for d in self.first[:-1])

    def shaped(self, build: Builder, out: Node) -> Node:
        heads = [value(self.w).shape[d] for d in self.first[:-1]]
        out = build(aten.unflatten.int, out, value(out).dim() - 1, heads)
        return build(aten.permute.default, build.squeezed(out, self.gone), [*self.order])


def _untranspose(w: Node) -> tuple[Node, bool]:
    """(weight, whether it is stored as [in, out]) for the right operand [in, out] of a GEMM."""
    return (w.args[0], False) if permutation(w) == [1, 0] else (w, True)  # type: ignore[return-value]


@or_none
def match_linear(node: Node) -> Linear | None:
    """The linear `node` computes, or None."""
    NoMatch.when(node.op != "call_function")
    if node.target is aten.linear.default:
        x, w, b = [*node.args, None][:3]
        return Linear(node, x, w, b) if value(w).dim() == 2 else None  # type: ignore[arg-type]
    if node.target in (aten.matmul.default, aten.mm.default):
        x, w = node.args  # type: ignore[misc]
        NoMatch.when(not isinstance(w, Node) or value(w).dim() != 2 or value(x).dim() < 2)
        return Linear(node, x, *_swap(w))  # type: ignore[arg-type]
    if node.target is aten.addmm.default:
        b, x, w = node.args  # type: ignore[misc]
        NoMatch.when(node.kwargs or not isinstance(b, Node) or value(b).dim() != 1)
        weight, transposed = _untranspose(w)  # type: ignore[arg-type]
        return Linear(node, x, weight, b, transposed)  # type: ignore[arg-type]
    equation = equation_of(node)
    return _by_equation(node, equation) if equation is not None and len(equation.terms) == 2 else None


def _swap(w: Node) -> tuple[Node, None, bool]:
    weight, transposed = _untranspose(w)
    return weight, None, transposed


def _by_equation(node: Node, equation: Equation) -> Linear | None:
    for x, w, tx, tw in _either_way(equation):
        contracted, out = tx[-1], equation.out
        if len(tw) != 2 or len(set(tw)) != 2:
            continue
        if contracted in tw and contracted not in out and tx[:-1] == out[:-1] and out[-1:] in tw and out[-1] not in tx:
            return Linear(node, x, w, None, transposed=tw[0] == contracted)
    return None


def _either_way(equation: Equation) -> Iterator[tuple[Node, Node, str, str]]:
    """(x, w, the letters of x, those of w) for either operand as x, where x's last dimension may be contracted."""
    (a, b), (ta, tb) = equation.operands, equation.terms
    for x, w, tx, tw in ((a, b, ta, tb), (b, a, tb, ta)):
        inner = tw.find(tx[-1:])
        if len(tx) > 1 and len(tw) > 1 and inner >= 0 and same_size(value(x).shape[-1], value(w).shape[inner]):
            yield x, w, tx, tw


def match_projection(node: Node) -> Linear | None:
    """The linear that `node` computes, be it by heads."""
    return match_linear(node) or (_by_heads(node) if node.op == "call_function" else None)


@or_none
def _by_heads(node: Node) -> ByHeads | None:
    equation = equation_of(node)
    if equation is not None:
        return _equation_by_heads(node, equation) if len(equation.terms) == 2 else None
    NoMatch.when(node.target is not aten.matmul.default)
    x, w = node.args
    NoMatch.when(value(w).dim() != 3 or value(x).dim() < 3 or not same_size(value(x).shape[-3], 1))
    rank = value(x).dim()  # [..., 1, s, r] by [h, r, d]
    return ByHeads(node, x, w, None, False, (0, 2, 1), (rank - 3,), (*range(rank - 3), rank - 2, rank - 3, rank - 1))  # type: ignore[arg-type]


def _equation_by_heads(node: Node, equation: Equation) -> ByHeads | None:
    out = equation.out
    for x, w, tx, tw in _either_way(equation):
        if len({*tx, *tw}) != len(tx) + len(tw) - 1:
            continue
        if _is_stored(x) and not _is_stored(w):
            continue  # the weight stands first
        heads = [letter for letter in tw if letter != tx[-1]]
        gone = tuple(i for i, letter in enumerate(tx[:-1]) if letter not in out)
        kept = [letter for letter in tx[:-1] if letter in out] + heads
        if sorted(kept) != sorted(out) or not all(same_size(value(x).shape[i], 1) for i in gone):
            continue
        first = tuple(tw.index(letter) for letter in [*heads, tx[-1]])
        return ByHeads(node, x, w, None, False, first, gone, tuple(kept.index(letter) for letter in out))
    return None


def _is_stored(node: Node) -> bool:
    """Whether `node` is a view or a cast of an input of the graph, as a weight is."""
    node = through(node, is_cast, _VIEWS)
    return node.op != "call_function"


_VIEWS = RESHAPES | UNIT_DIMS | PERMUTATIONS | {aten.unflatten.int, aten.slice.Tensor, aten.detach.default}


def is_projection(node: Node) -> bool:
    return match_projection(node) is not None
