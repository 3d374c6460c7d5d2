"""What stands between queries or keys and what a core takes: their l2 norm, and a number."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import argument, value
from megacpp_compile.fx.views import uncast
from megacpp_compile.matchers.delta_rule.rules import POWERS
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, operand_of
from megacpp_compile.reader.links import chain


@dataclasses.dataclass(frozen=True)
class Before:
    """What an operand is made of: `node`, the nodes `between`, and the eps of a norm among them, or None."""

    node: Node
    between: frozenset[Node] = frozenset()
    eps: float | None = None


def unscaled(algebra: Algebra, leaf: Node) -> Before:
    """`leaf` before a multiplication by a number, and the padding and repetitions in front of that."""
    way = chain(leaf, algebra.passes_on, _by_a_number)
    last = max((i + 1 for i, n in enumerate(way[:-1]) if _by_a_number(n)), default=0)
    node, between = operand_of(algebra, way[last])
    return Before(node, frozenset([*way[:last], *between])) if last else Before(leaf)


def unnormed(algebra: Algebra, leaf: Node) -> Before:
    """`leaf` before its l2 norm, and the casts and repetitions in front of that; `leaf` where it has none."""
    at, between = algebra.path(leaf)
    norm = _norm(at)
    if norm is None:
        return Before(leaf)
    source, eps, inside = norm
    node, more = operand_of(algebra, source)
    return Before(node, frozenset(between | inside | more), eps)


def _by_a_number(n: Node) -> bool:
    if n.target not in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar) or n.kwargs:
        return False
    return isinstance(n.args[0], Node) and isinstance(n.args[1], (int, float))


@or_none
def _norm(n: Node) -> tuple[Node, float, set[Node]] | None:
    """(x, eps, the nodes of the norm) where `n` is x * rsqrt(sum(x^2) + eps) over the last dimension."""
    NoMatch.when(n.kwargs or len(n.args) != 2 or not all(isinstance(a, Node) for a in n.args))
    pairs: list[Any] = []
    if n.target is aten.mul.Tensor:
        pairs = [(a, b) for a, b in (n.args, n.args[::-1]) if b.target is aten.rsqrt.default]  # type: ignore[union-attr]
    elif n.target is aten.div.Tensor:
        x, below = n.args
        if _is_last_norm(below):
            return (x, 0.0, {n, below}) if _same(below.args[0], x) else None  # type: ignore[return-value, union-attr, arg-type]
        pairs = [(x, below)] if below.target is aten.sqrt.default else []  # type: ignore[union-attr]
    for x, root in pairs:
        total, eps, inside = root.args[0], 0.0, {n, root}
        if total.target in (aten.add.Tensor, aten.add.Scalar) and not total.kwargs:
            NoMatch.when(not isinstance(total.args[1], (int, float)))
            inside.add(total)
            total, eps = total.args[0], float(total.args[1])
        NoMatch.when(total.target is not aten.sum.dim_IntList or not _over_last(total, 1, 2))
        square = total.args[0]
        base = _square_of(square)
        if base is not None and _same(base, x):
            return x, eps, {*inside, total, square}
    return None


def _is_last_norm(n: Any) -> bool:
    return n.target is aten.linalg_vector_norm.default and argument(n, 1, "ord", 2) == 2 and _over_last(n, 2, 3)


def _over_last(n: Node, dim: int, keep: int) -> bool:
    over = argument(n, dim, "dim")
    return bool(argument(n, keep, "keepdim", False)) and list(over or ()) in ([-1], [value(n.args[0]).dim() - 1])


def _square_of(n: Any) -> Node | None:
    if n.target is aten.mul.Tensor and n.args[0] is n.args[1]:
        return n.args[0]
    if n.target in POWERS and (n.target is aten.square.default or n.args[1] == 2):
        return n.args[0]
    return None


def _same(a: Node, b: Node) -> bool:
    return a is b or uncast(a) is uncast(b)
