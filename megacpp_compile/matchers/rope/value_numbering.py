"""Which nodes of a graph compute the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.fx.mode_states import ModeStates


class ValueNumbering:
    """Names nodes that compute the same thing alike: `cos.unsqueeze(1)` written twice is one table, the first of them.

    Under different modes nothing is the same: one copy may be rounded or without gradient.
    """

    def __init__(self, states: ModeStates) -> None:
        self.states = states
        self._leader: dict[Node, Node] = {}

    def leader(self, node: Node) -> Node:
        """The first node of the graph that computes what `node` does."""
        if not self._leader:
            firsts: dict[Any, Node] = {}
            for n in self.states:  # in the graph's order
                self._leader[n] = firsts.setdefault(self._hash(n), n)
        return self._leader[node]

    @staticmethod
    def _pure(n: Node) -> bool:
        if n.op != "call_function":
            return False
        if isinstance(n.target, OpOverload):
            tags = n.target.tags
            return torch.Tag.nondeterministic_seeded not in tags and not n.target._schema.is_mutable
        return n.target is operator.getitem

    def _hash(self, n: Node) -> Any:
        if not self._pure(n):
            return id(n)
        names = self._leader
        key = (self.states[n], n.target, _freeze(n.args, names), _freeze(sorted(n.kwargs.items()), names))
        try:
            hash(key)
        except TypeError:
            return id(n)
        return key


def _freeze(x: Any, names: dict[Node, Any]) -> Any:
    if isinstance(x, Node):
        return ("node", id(names[x]))
    if isinstance(x, (list, tuple)):
        return tuple(_freeze(v, names) for v in x)
    if isinstance(x, slice):
        return ("slice", x.start, x.stop, x.step)
    return (type(x).__name__, x)
