"""`x @ w.T + b` however it is spelled: linear, matmul, mm, addmm, einsum."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value

aten = torch.ops.aten


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


def _untranspose(w: Node) -> tuple[Node, bool]:
    """(weight, whether it is stored as [in, out]) for the right operand [in, out] of a GEMM."""
    if w.target is aten.t.default or (w.target is aten.numpy_T.default if hasattr(aten, "numpy_T") else False):
        return w.args[0], False  # type: ignore[return-value]
    if w.target is aten.transpose.int and {w.args[1] % 2, w.args[2] % 2} == {0, 1}:  # type: ignore[operator]
        return w.args[0], False  # type: ignore[return-value]
    if w.target is aten.permute.default and [d % 2 for d in w.args[1]] == [1, 0]:  # type: ignore[union-attr]
        return w.args[0], False  # type: ignore[return-value]
    return w, True


def match_linear(node: Node) -> Linear | None:
    """The linear `node` computes, or None."""
    if node.op != "call_function":
        return None
    if node.target is aten.linear.default:
        x, w, b = [*node.args, None][:3]
        return Linear(node, x, w, b) if value(w).dim() == 2 else None  # type: ignore[arg-type]
    if node.target in (aten.matmul.default, aten.mm.default):
        x, w = node.args  # type: ignore[misc]
        if not isinstance(w, Node) or value(w).dim() != 2 or value(x).dim() < 2:
            return None
        return Linear(node, x, *_swap(w))  # type: ignore[arg-type]
    if node.target is aten.addmm.default:
        b, x, w = node.args  # type: ignore[misc]
        if node.kwargs or not isinstance(b, Node) or value(b).dim() != 1:
            return None
        weight, transposed = _untranspose(w)  # type: ignore[arg-type]
        return Linear(node, x, weight, b, transposed)  # type: ignore[arg-type]
    if node.target is aten.einsum.default:
        return _einsum(node)
    return None


def _swap(w: Node) -> tuple[Node, None, bool]:
    weight, transposed = _untranspose(w)
    return weight, None, transposed


def _einsum(node: Node) -> Linear | None:
    equation, operands = node.args[:2]
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:  # type: ignore[arg-type]
        return None
    inputs, out = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    for x, w, tx, tw in ((*operands, *terms), (*reversed(operands), *reversed(terms))):  # type: ignore[misc]
        if len(tw) != 2 or len(tx) < 2 or "." in tw or value(w).dim() != 2 or len(set(tw)) != 2:
            continue
        contracted = tx[-1]
        if contracted in tw and contracted not in out and tx[:-1] == out[:-1] and out[-1:] in tw and out[-1] not in tx:
            return Linear(node, x, w, None, transposed=tw[0] == contracted)
    return None


def is_projection(node: Node) -> bool:
    return match_linear(node) is not None
