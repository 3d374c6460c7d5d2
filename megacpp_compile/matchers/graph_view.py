"""A captured graph with the analyses that matchers and passes share."""

from __future__ import annotations

import functools

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.config.options import Config
from megacpp_compile.fx.differentiated import Differentiated
from megacpp_compile.fx.mode_states import ModeStates, mode_states
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.rope.frozen_tables import frozen_tables
from megacpp_compile.matchers.rope.heads import Heads, find_heads
from megacpp_compile.matchers.softmax_attention.find import attentions
from megacpp_compile.matchers.softmax_attention.parts import Attention


class GraphView:
    """A captured graph and, computed once, the analyses of it; valid until the graph changes.

    Matchers read `graph`, `weights`, `trained` and the analyses; `fake_mode` and `config` are for a pass's rewrite.
    """

    def __init__(
        self, graph: fx.Graph, fake_mode: FakeTensorMode, weights: frozenset[Node], config: Config,
        trained: frozenset[Node] = frozenset(),
    ) -> None:  # fmt: skip
        self.graph, self.fake_mode, self.weights, self.config = graph, fake_mode, weights, config
        self.trained = trained

    def needs_grad(self, node: Node) -> bool:
        """Whether `node` is trained or computed from what is, be that detached or without gradients recorded."""
        return any(n in self.trained for n in ancestors([node]))

    def recorded(self, node: Node) -> bool:
        """Whether `node` runs where autograd records; a frame has its mode while it is compiled."""
        return torch.is_grad_enabled() and self.mode_states[node].grad

    def has_backward(self, node: Node) -> bool:
        """Whether a gradient flows to or through `node`."""
        return node in self.differentiated

    @functools.cached_property
    def differentiated(self) -> Differentiated:
        """The nodes that a gradient flows to or through."""
        return Differentiated(self.graph, self.trained, self.mode_states)

    @functools.cached_property
    def heads(self) -> Heads:
        """Every attention head with a rotary embedding, and the near misses."""
        trained = self.trained if torch.is_grad_enabled() else frozenset[Node]()  # a frame has its mode while compiled
        return find_heads(self.graph, self.weights - frozen_tables(self.graph, self.weights, trained))

    @functools.cached_property
    def attentions(self) -> list[Attention | MatchFailure]:
        """Every attention that is spelled out or handed to torch's op, and the near misses."""
        return list(attentions(self.graph, self.weights))

    @functools.cached_property
    def mode_states(self) -> ModeStates:
        """The grad and autocast mode that every node runs under."""
        return mode_states(self.graph)
