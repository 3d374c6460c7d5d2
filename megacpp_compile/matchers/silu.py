"""SiLU by meaning: `silu(x)`, `x * sigmoid(x)`, `x / (1 + exp(-x))`, the sigmoid perhaps in a wider dtype than x."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import is_cast

aten = torch.ops.aten


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
        inner = _one_plus_exp_minus(below)
        if inner is not None and inner[0] is x:
            return x, {node, *inner[1]}  # type: ignore[return-value]
    return None


def _wider_sigmoid(x: Any, gate: Any) -> tuple[Node, set[Node]] | None:
    """(x, nodes) where `gate` is the logistic function of x, computed in its dtype or a wider one and rounded to no
    narrower one."""
    casts: set[Node] = set()
    while isinstance(gate, Node) and is_cast(gate):
        casts.add(gate)
        gate = gate.args[0]
    inner = match_sigmoid(gate)
    if inner is None or not isinstance(x, Node):
        return None
    if inner[0] is x and not casts:
        return x, inner[1]
    source, own = _unwidened(x)
    other, its = _unwidened(inner[0])
    bits = torch.finfo(value(source).dtype).bits if value(source).is_floating_point() else 0
    if source is not other or any(torch.finfo(value(n).dtype).bits < bits for n in casts):
        return None
    return source, {*inner[1], *casts, *own, *its}


def _unwidened(node: Node) -> tuple[Node, set[Node]]:
    """(what `node` is a widening cast of, the casts)."""
    casts: set[Node] = set()
    while is_cast(node) and torch.promote_types(value(node.args[0]).dtype, value(node).dtype) == value(node).dtype:
        casts.add(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, casts


def match_sigmoid(node: Any) -> tuple[Node, set[Node]] | None:
    """(x, nodes) where `node` is the logistic function of x, or None."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.sigmoid.default:
        return node.args[0], {node}  # type: ignore[return-value]
    below = None
    if node.target is aten.reciprocal.default:
        below = node.args[0]
    elif node.target is aten.div.Tensor and node.args[0] == 1 and not node.kwargs:
        below = node.args[1]
    elif node.target is aten.mul.Tensor and node.args[1] == 1 and isinstance(node.args[0], Node):
        if node.args[0].target is aten.reciprocal.default:  # `1 / x`
            inner = _one_plus_exp_minus(node.args[0].args[0])
            return None if inner is None else (inner[0], {node, node.args[0], *inner[1]})
    inner = _one_plus_exp_minus(below)
    return None if inner is None else (inner[0], {node, *inner[1]})


def _one_plus_exp_minus(node: Any) -> tuple[Node, set[Node]] | None:
    if not isinstance(node, Node) or node.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    if node.kwargs.get("alpha", 1) != 1:
        return None
    exp = next((a for a in node.args[:2] if isinstance(a, Node)), None)
    if exp is None or exp.target is not aten.exp.default or 1 not in [a for a in node.args[:2] if a is not exp]:
        return None
    neg = exp.args[0]
    if not isinstance(neg, Node) or neg.target is not aten.neg.default:
        return None
    return neg.args[0], {node, exp, neg}  # type: ignore[return-value]
