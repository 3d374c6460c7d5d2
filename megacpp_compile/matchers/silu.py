"""SiLU by meaning: `silu(x)`, `x * sigmoid(x)`, `x / (1 + exp(-x))`."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


def match_silu(node: Any) -> tuple[Node, set[Node]] | None:
    """(x, nodes from x up to and with `node`) where `node` is SiLU of x, or None."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.silu.default:
        return node.args[0], {node}  # type: ignore[return-value]
    if node.target is aten.mul.Tensor:
        for x, gate in (node.args[:2], node.args[1::-1]):
            inner = match_sigmoid(gate)
            if inner is not None and inner[0] is x:
                return x, {node, *inner[1]}  # type: ignore[return-value]
    if node.target is aten.div.Tensor and not node.kwargs:
        x, below = node.args[:2]
        inner = _one_plus_exp_minus(below)
        if inner is not None and inner[0] is x:
            return x, {node, *inner[1]}  # type: ignore[return-value]
    return None


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
