"""SiLU by meaning: `silu(x)`, `x * sigmoid(x)`, `x / (1 + exp(-x))`, the sigmoid perhaps in a wider dtype than x; and
swish, whose sigmoid is of a multiple of x."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import is_cast, uncast
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.reader.links import chain


def match_silu(node: Any) -> tuple[Node, set[Node]] | None:
    """(x, nodes from x up to and with `node`) where `node` is SiLU of x, or None."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.silu.default:
        return node.args[0], {node}  # type: ignore[return-value]
    if node.target is aten.mul.Tensor:
        for x, gate in (node.args[:2], node.args[1::-1]):
            found = _wider_sigmoid(x, gate)
            if found is not None:
                return found[0], {node, *found[1]}
    if node.target is aten.div.Tensor and not node.kwargs:
        x, below = node.args[:2]
        inner = _negated(_one_plus_exp(below))
        if inner is not None and inner[0] is x:
            return x, {node, *inner[1]}  # type: ignore[return-value]
    return None


@or_none
def _wider_sigmoid(x: Any, gate: Any) -> tuple[Node, set[Node]] | None:
    """(x, nodes) where `gate` is the logistic function of x, computed in its dtype or a wider one and rounded to no
    narrower one."""
    *casts, gate = chain(gate, is_cast)
    inner = NoMatch.unless(match_sigmoid(gate))
    NoMatch.when(not isinstance(x, Node))
    if inner[0] is x and not casts:
        return x, inner[1]
    source, own = _unwidened(x)
    other, its = _unwidened(inner[0])
    bits = torch.finfo(value(source).dtype).bits if value(source).is_floating_point() else 0
    NoMatch.when(source is not other or any(torch.finfo(value(n).dtype).bits < bits for n in casts))
    return source, {*inner[1], *casts, *own, *its}


def _unwidened(node: Node) -> tuple[Node, set[Node]]:
    """(what `node` is a widening cast of, the casts)."""
    *casts, node = chain(node, lambda n: is_cast(n) and _joint(n) == value(n).dtype)
    return node, {*casts}


def _joint(cast: Node) -> torch.dtype:
    return torch.promote_types(value(cast.args[0]).dtype, value(cast).dtype)


def match_swish(node: Node) -> tuple[Node, float] | None:
    """(x, alpha) where `node` is `x * sigmoid(alpha * x)`, of one and the same node x."""
    if node.target is aten.silu.default:
        return node.args[0], 1.0  # type: ignore[return-value]
    target, args = node.target, node.args
    if target is aten.mul.Tensor and all(isinstance(a, Node) for a in args):
        for x, gate in (args, args[::-1]):
            inner = match_scaled_sigmoid(gate)
            if inner is not None and inner[0] is uncast(x):  # type: ignore[arg-type]
                return inner
    if target is aten.div.Tensor and not node.kwargs and (below := _one_plus_exp(args[1])) is not None:
        x, alpha = scaled(below[0])
        return (x, -alpha) if x is uncast(args[0]) else None  # type: ignore[arg-type]
    inside, factor = scaled(node)
    if inside.target is aten.silu.default and factor != 1:  # silu(alpha * x) / alpha
        x, alpha = scaled(inside.args[0])  # type: ignore[arg-type]
        return (x, alpha) if abs(alpha * factor - 1) < 1e-12 else None
    return None


@or_none
def match_scaled_sigmoid(node: Any) -> tuple[Node, float] | None:
    """(x, alpha) where `node` is `sigmoid(alpha * x)`, or None."""
    found = NoMatch.unless(_logistic(uncast(node)) if isinstance(node, Node) else None)
    x, alpha = scaled(found[0])
    return x, found[1] * alpha


def scaled(node: Node) -> tuple[Node, float]:
    """(x, factor) where `node` is x, which is no such product itself, times a number."""
    factor = 1.0
    while (node := uncast(node)).target in (aten.mul.Tensor, aten.div.Tensor, aten.neg.default) and not node.kwargs:
        by = number_of(node.args[1]) if len(node.args) > 1 else -1.0
        if not by or not isinstance(node.args[0], Node):
            break
        factor = factor / by if node.target is aten.div.Tensor else factor * by
        node = node.args[0]
    return node, factor


@or_none
def match_sigmoid(node: Any) -> tuple[Node, set[Node]] | None:
    """(x, nodes) where `node` is the logistic function of x, or None."""
    found = NoMatch.unless(_logistic(node))
    return (found[0], found[2]) if found[1] == 1 else _negated((found[0], found[2]))


def _logistic(node: Any) -> tuple[Node, int, set[Node]] | None:
    """(x, sign, nodes) where `node` is the logistic function of x times sign, or None."""
    if not isinstance(node, Node):
        return None
    if node.target in (aten.sigmoid.default, aten.special_expit.default):
        return node.args[0], 1, {node}  # type: ignore[return-value]
    below, above = None, {node}
    if node.target is aten.reciprocal.default:
        below = node.args[0]
    elif node.target is aten.div.Tensor and node.args[0] == 1 and not node.kwargs:
        below = node.args[1]
    elif node.target is aten.mul.Tensor and node.args[1] == 1 and isinstance(node.args[0], Node):
        if node.args[0].target is aten.reciprocal.default:  # `1 / x`
            below, above = node.args[0].args[0], {node, node.args[0]}
    inner = _one_plus_exp(below)
    return None if inner is None else (inner[0], -1, above | inner[1])


def _negated(found: tuple[Node, set[Node]] | None) -> tuple[Node, set[Node]] | None:
    """(x, nodes with it) where what was `found` is minus x."""
    if found is None or found[0].target is not aten.neg.default:
        return None
    neg, nodes = found
    return neg.args[0], {*nodes, neg}  # type: ignore[return-value]


@or_none
def _one_plus_exp(node: Any) -> tuple[Node, set[Node]] | None:
    """(x, nodes) where `node` is `1 + exp(x)`, or None."""
    NoMatch.when(not isinstance(node, Node) or node.target not in (aten.add.Tensor, aten.add.Scalar))
    NoMatch.when(node.kwargs.get("alpha", 1) != 1)
    exp = NoMatch.unless(next((a for a in node.args[:2] if isinstance(a, Node)), None))
    NoMatch.when(exp.target is not aten.exp.default or 1 not in [a for a in node.args[:2] if a is not exp])
    return exp.args[0], {node, exp}  # type: ignore[return-value]
