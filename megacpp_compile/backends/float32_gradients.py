"""Hands gradients of weights that a GEMM has written in float32 to autograd as they are.

Autograd gives each tensor within a frame a gradient in its own dtype, whatever the parameter's `grad_dtype` says, so
behind the GEMM stands a cast, and behind that whatever moves the weight and adds its readers up:

Before: `dw = fp8_linear_backward(..., float32)[1]`; `dw16 = dw.to(bfloat16)`; `return dw16.t()`
After:  `return dw.t()`

What autograd makes of it outside of the frame is the parameter's own: float32 is added to `.grad` as it is, and cast
where the frame runs with a parameter that has no such `grad_dtype`, or no longer.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.fakes import detect_fake_mode
from megacpp_compile.fx.aliasing import memory_of
from megacpp_compile.fx.edit import Builder, drop_dead, value
from megacpp_compile.fx.inductor_pass import GraphPass
from megacpp_compile.fx.views import COPIES, PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast

aten = torch.ops.aten
_MOVES = RESHAPES | PERMUTATIONS | UNIT_DIMS | COPIES
_OF_WEIGHTS = 1  # which of the results of an op's backward
_CAST = torch.ops.prims.convert_element_type.default


def keep_float32(graph: fx.Graph) -> None:
    """Change `graph`, which autograd has made, in place: what it returns of weights' gradients in float32
    is that, moved and added up as it was."""
    asked = {n for n in graph.nodes if n.op == "call_function" and _writes_float32(n)}
    if not asked:
        return
    output = graph.output_node()
    wide = _Wide(graph, asked)
    output.args = fx.map_arg(output.args, lambda n: wide.of(n) or n)
    drop_dead(graph)


class KeepFloat32(GraphPass):
    """The same in a joint graph, so that a plan of what a step keeps has gradients in the size they will have."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def run(self, graph: fx.Graph) -> None:
        keep_float32(graph)

    def key(self) -> tuple[Any, ...]:
        return ()

    def __reduce__(self) -> Any:
        return KeepFloat32, (self.before,)


def _writes_float32(node: Node) -> bool:
    """Whether `node` was asked for gradients of 16-bit weights in float32."""
    ops = torch.ops.megacpp
    if node.target not in (ops.fp8_linear_backward.default, ops.fp8_block_linear_backward.default):
        return False
    weights: Any = node.args[3]
    weight = weights[0] if isinstance(weights, (list, tuple)) else weights
    return bool(value(node)[_OF_WEIGHTS].dtype == torch.float32 != value(weight).dtype)


class _Wide:
    """Gradients in float32 of nodes that hold them rounded."""

    def __init__(self, graph: fx.Graph, asked: set[Node]) -> None:
        self.graph, self.asked = graph, asked
        self.found: dict[Node, Node | None] = {}

    def of(self, node: Node) -> Node | None:
        """What `node` is without rounding, made where it does not exist; None where none of it is such a gradient."""
        if node not in self.found:
            self.found[node] = self._made(node)
        return self.found[node]

    def _made(self, node: Node) -> Node | None:
        held = value(node)
        if not isinstance(held, torch.Tensor) or node.op != "call_function":
            return None
        if held.dtype == torch.float32:
            return node if self._is_asked(node) else None
        if _casts(node):
            return self.of(node.args[0])  # type: ignore[arg-type]
        if node.target in _MOVES:
            wide = self.of(node.args[0])  # type: ignore[arg-type]
            return None if wide is None else self._again(node, wide, *node.args[1:])
        if node.target is aten.add.Tensor:
            parts = [self.of(a) or a for a in node.args]  # type: ignore[arg-type]
            return None if parts == [*node.args] else self._again(node, *parts)
        if node.target is aten.cat.default:
            parts = [self.of(a) or a for a in node.args[0]]  # type: ignore[union-attr, arg-type]
            return None if parts == [*node.args[0]] else self._again(node, parts, *node.args[1:])  # type: ignore[misc]
        return None

    def _is_asked(self, node: Node) -> bool:
        source = memory_of(node)
        while source.target in COPIES:
            source = memory_of(source.args[0])
        return source.target is operator.getitem and source.args[0] in self.asked and source.args[1] == _OF_WEIGHTS

    def _again(self, node: Node, *args: Any) -> Node:
        """The call of `node` on other arguments, behind it."""
        mode = detect_fake_mode(value(node))
        assert mode is not None
        return Builder(self.graph, mode, node.next, node)(node.target, *args, **node.kwargs)


def _casts(node: Node) -> bool:
    """Whether `node` is a cast, as it stands before or behind Inductor's decompositions."""
    return is_cast(node) or node.target is _CAST
