"""Functions as the graphs that matchers read: functional, pre-dispatch ATen with fake values, canonicalized."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from megacpp_compile.frontend.canonicalize import canonicalize
from tests.capture import captured

aten = torch.ops.aten


@dataclasses.dataclass
class Traced:
    graph: Graph
    inputs: list[Node]
    outputs: list[Node]

    @property
    def output(self) -> Node:
        (node,) = self.outputs
        return node

    @property
    def calls(self) -> set[Node]:
        return {n for n in self.graph.nodes if n.op == "call_function"}

    def only(self, *targets: Any) -> Node:
        """The one node that calls any of `targets`."""
        (node,) = [n for n in self.graph.nodes if n.target in targets]
        return node

    def __call__(self, *args: Tensor) -> Any:
        """What the graph computes: its outputs."""
        return GraphModule(nn.Module(), self.graph)(*args)


def trace(f: Callable[..., Any], *args: Tensor) -> Traced:
    """The graph of `f(*args)`, every argument a graph input; as it is captured, it is kept from run to run."""
    graph, _ = captured(f, args)
    canonicalize(graph.gm.graph, graph.fake_mode)
    (outputs,) = graph.gm.graph.output_node().args
    return Traced(graph.gm.graph, list(graph.gm.graph.find_nodes(op="placeholder")), list(outputs))
