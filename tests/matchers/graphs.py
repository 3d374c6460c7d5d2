"""Functions as the graphs that matchers read: functional, pre-dispatch ATen with fake values, canonicalized."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from megacpp_compile.frontend.canonicalize import canonicalize

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

    def only(self, *targets: Any) -> Node:
        """The one node that calls any of `targets`."""
        (node,) = [n for n in self.graph.nodes if n.target in targets]
        return node


class _Function(nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        out = self.f(*args)
        return out if isinstance(out, tuple) else (out,)


def trace(f: Callable[..., Any], *args: Tensor) -> Traced:
    """The graph of `f(*args)`, every argument a graph input."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) for a in args]
    module, _ = aot_export_module(_Function(f), fakes, trace_joint=False, pre_dispatch=True)
    canonicalize(module.graph, mode)
    inputs = module.graph.find_nodes(op="placeholder")
    (outputs,) = module.graph.output_node().args
    return Traced(module.graph, list(inputs), list(outputs))
