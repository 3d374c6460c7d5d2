"""Which values of a graph a gradient flows to or through."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import DETACH
from megacpp_compile.matchers.graph_view import GraphView


def differentiated(view: GraphView) -> set[Node]:
    """The nodes that are trained, or computed from such with gradients recorded; none where the frame records none.
    Calls of methods are those on DTensors."""
    if not torch.is_grad_enabled():
        return set()
    found = set(view.trained)
    for node in view.graph.nodes:
        if node.op not in ("call_function", "call_method") or node.target in (DETACH, "detach"):
            continue
        if not view.mode_states[node].grad:
            continue
        if _has_floats(value(node)) and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _has_floats(fake: Any) -> bool:
    if isinstance(fake, (list, tuple)):
        return any(map(_has_floats, fake))
    return isinstance(fake, torch.Tensor) and (fake.is_floating_point() or fake.is_complex())
