"""Which values of a graph a gradient flows to or through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.mode_states import ModeStates
from megacpp_compile.fx.views import DETACH, values_read


def trains(inputs: Iterable[Any]) -> bool:
    """Whether what is computed of `inputs` is differentiated."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


class Differentiated:
    """The nodes that are trained, or computed from such with gradients recorded; none where the frame records none.
    What passes add to the graph meanwhile is judged when it is asked for. Calls of methods are those on DTensors."""

    def __init__(self, graph: fx.Graph, trained: Iterable[Node], states: ModeStates) -> None:
        self._known = {n: False for n in graph.nodes if n.op not in ("call_function", "call_method")}
        self._recorded = {n: state.grad for n, state in states.items()}
        if torch.is_grad_enabled():
            self._known |= dict.fromkeys(trained, True)

    def __contains__(self, node: Node) -> bool:
        pending = [node]
        while pending:
            n = pending[-1]
            sources = values_read(n) if n not in self._known else []
            if unknown := [source for source in sources if source not in self._known]:
                pending += unknown
                continue
            pending.pop()
            if n not in self._known:
                self._known[n] = any(map(self._known.__getitem__, sources)) and self._passes_on(n)
        return self._known[node]

    def _passes_on(self, node: Node) -> bool:
        return node.target not in (DETACH, "detach") and self._is_recorded(node) and _has_floats(value(node))

    def _is_recorded(self, node: Node) -> bool:
        before = node
        while before not in self._recorded:  # new: it stands where the nodes stood that it is to replace
            before = before.prev
        return self._recorded.setdefault(node, self._recorded[before])


def _has_floats(fake: Any) -> bool:
    if isinstance(fake, (list, tuple)):
        return any(map(_has_floats, fake))
    return isinstance(fake, torch.Tensor) and (fake.is_floating_point() or fake.is_complex())
