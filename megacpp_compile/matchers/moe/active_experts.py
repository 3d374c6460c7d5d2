"""Finds lists of the experts that any token chose: a loop over one breaks the graph in every iteration."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.size_checks import FINDS
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView

aten = torch.ops.aten
_COUNTS = (aten.sum.dim_IntList, aten.sum.default, aten.any.dim, aten.any.dims, aten.bincount.default,
           aten.histc.default)  # fmt: skip
_ADVICE = "a loop over the experts that were hit breaks the graph; write `for e in range(num_experts):` instead"
_STEPS = 8  # between counting an expert's tokens and the list of those that have any


def find(view: GraphView) -> Iterator[MatchFailure]:
    """A failure with advice at every list of the experts that have tokens."""
    for node in view.graph.nodes:
        if node.target not in FINDS or len(node.args) != 1:
            continue
        step, counted = node.args[0], False
        for _ in range(_STEPS):
            if not isinstance(step, Node) or step.op != "call_function" or not step.args:
                break
            counted = counted or step.target in _COUNTS
            if counted and step.target in (aten.one_hot.default, aten.bincount.default, aten.histc.default):
                yield MatchFailure(node, "loop-over-data", _ADVICE)
                break
            step = step.args[0]
