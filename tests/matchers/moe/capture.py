"""Captured graphs of routed experts, with no pass run on them, and what a matcher says of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from megacpp_compile.config.options import Config
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.gate_matrix import is_filled
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts
from megacpp_compile.passes._driver import pass_names
from tests.frames import Function, run_graph
from tests.passes.experts import DIM, TOKENS, MoE

# With a plan, as frames too small to hold an idiom are captured only then.
NO_PASSES = Config(strict=True, disable=pass_names(), precision=PrecisionPlan({"*": "bf16"}))


def view_of(module: nn.Module | Callable[..., Tensor], *args: Tensor, grad: bool = True) -> GraphView:
    module = module if isinstance(module, nn.Module) else Function(module)
    with torch.set_grad_enabled(grad):
        (analysis,) = run_graph(module, args, NO_PASSES).analyses
    captured = analysis.captured
    return GraphView(captured.gm.graph, captured.fake_mode, captured.weights, NO_PASSES, captured.trained)


def view_of_experts(body: Callable[..., Tensor], stacked: bool = False, **options: Any) -> GraphView:
    return view_of(MoE(body, stacked=stacked, **options), torch.randn(TOKENS, DIM))


def view_of_sorted(body: Callable[..., Tensor]) -> GraphView:
    """In bfloat16, and forward alone: torch's grouped GEMM on the CPU takes nothing else."""
    module = MoE(body, stacked=True).bfloat16()
    return view_of(module, torch.randn(TOKENS, DIM, dtype=torch.bfloat16), grad=False)


def the_layer(find: Callable[..., Any], view: GraphView) -> RoutedExperts:
    """The one layer that `find` finds; it is closed: what nodes inside read is inside or an input."""
    (layer,) = find(view)
    assert isinstance(layer, RoutedExperts), layer
    assert layer.output in layer.inside and layer.inside.isdisjoint(layer.inputs)
    known = layer.inside | {*layer.inputs}
    assert all(operand in known for n in layer.inside if not is_filled(n, 0.0) for operand in n.all_input_nodes)
    assert {layer.x, layer.indices, layer.gates} <= {*layer.inputs}
    return layer


def the_failure(find: Callable[..., Any], view: GraphView) -> MatchFailure:
    (failure,) = find(view)
    assert isinstance(failure, MatchFailure), failure
    return failure


def described(layer: RoutedExperts) -> dict[str, Any]:
    """All of the description that is no node, and the shapes of weights as they are stored."""
    weights = dict.fromkeys(g.weight.tensor for e in layer.experts for g in (*e.ups, e.down))
    return {
        "experts": len(layer.experts), "weights": [tuple(value(w).shape) for w in weights], "first": layer.first,
        "base": layer.base is not None, "choices": layer.choices, "by_expert": layer.by_expert, "column": layer.column,
        "scaled_input": layer.scaled_input, "activation": layer.activation, "layout": layer.layout,
    }  # fmt: skip


def ids(p: Any) -> str:
    return p.__name__ if callable(p) else ""


def result(view: GraphView) -> Node:
    """What the graph returns."""
    ((node,),) = view.graph.output_node().args
    return node
