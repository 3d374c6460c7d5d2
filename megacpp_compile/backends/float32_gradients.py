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
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.fakes import detect_fake_mode
from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, drop_dead, value
from megacpp_compile.fx.inductor_pass import GraphPass
from megacpp_compile.fx.views import COPIES, PERMUTATIONS, RESHAPES, SPLITS, UNIT_DIMS, is_cast

_MOVES = RESHAPES | PERMUTATIONS | UNIT_DIMS | COPIES | SPLITS | {operator.getitem}
_OF_WEIGHTS = 1  # which of the results of an op's backward


def keep_float32(graph: fx.Graph) -> None:
    """Change `graph`, which autograd has made, in place: of weights' gradients that it has in float32 it returns these,
    moved and added up as what was rounded."""
    exact: dict[Node, Node] = {}  # node -> the same without rounding
    for node in list(graph.nodes):
        if (made := _exact(graph, node, exact)) is not None:
            exact[node] = made
    if exact:
        output = graph.output_node()
        output.args = fx.map_arg(output.args, lambda n: exact.get(n, n))
        drop_dead(graph)


class KeepFloat32(GraphPass):
    """The same in a joint graph, so that a plan of what a step keeps has gradients in the size they will have."""

    def run(self, graph: fx.Graph) -> None:
        keep_float32(graph)


def _exact(graph: fx.Graph, node: Node, known: Mapping[Node, Node]) -> Node | None:
    """What `node` is without rounding: itself, or made for it; None where it is no gradient in float32, nor made of one
    by moves, casts and sums."""
    args: tuple[Any, ...] = node.args
    if node.target is operator.getitem and args[1] == _OF_WEIGHTS and _writes_float32(args[0]):
        return node
    if node.op != "call_function" or known.keys().isdisjoint(node.all_input_nodes):
        return None
    if is_cast(node) or node.target is torch.ops.prims.convert_element_type.default:
        return known[args[0]]
    if node.target in _MOVES or node.target is aten.add.Tensor:
        new = [known.get(a, a) if isinstance(a, Node) else a for a in args]
    elif node.target is aten.cat.default:
        new = [[known.get(a, a) for a in args[0]], *args[1:]]
    else:
        return None
    if new == list(args):
        return node
    mode = detect_fake_mode(value(node))
    assert mode is not None
    return Builder(graph, mode, node.next, node)(node.target, *new, **node.kwargs)


def _writes_float32(node: Node) -> bool:
    """Whether `node` was asked for gradients of 16-bit weights in float32."""
    ops = torch.ops.megacpp
    if node.target not in (ops.fp8_linear_backward.default, ops.fp8_block_linear_backward.default):
        return False
    weights: Any = node.args[3]
    weight = weights[0] if isinstance(weights, (list, tuple)) else weights
    return bool(value(node)[_OF_WEIGHTS].dtype == torch.float32 != value(weight).dtype)
