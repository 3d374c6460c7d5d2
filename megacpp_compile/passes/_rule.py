"""What a pass is, and what it says of the graph it looked at."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx import Node

from megacpp_compile.config.options import Config
from megacpp_compile.fx.edit import Regions, regions
from megacpp_compile.matchers.rope.heads import Heads, find_heads


@dataclasses.dataclass
class Match:
    """An idiom found. `inputs` and `outputs` bound the plain subgraph; `rewrite` replaces it and returns the op's
    node and, in order, the nodes that now carry `outputs`."""

    node: Node
    inputs: list[Node]
    outputs: list[Node]
    rewrite: Callable[[], tuple[Node, list[Node]]]


@dataclasses.dataclass(frozen=True)
class MatchFailure:
    """An idiom nearly found: the first node that differed and why. `tag` is machine-readable."""

    node: Node
    tag: str
    reason: str


class GraphView:
    """A captured graph with the analyses passes share; good until the graph changes."""

    def __init__(
        self, graph: fx.Graph, fake_mode: FakeTensorMode, weights: frozenset[Node], config: Config,
        trained: frozenset[Node] = frozenset(),
    ) -> None:  # fmt: skip
        self.graph, self.fake_mode, self.weights, self.config = graph, fake_mode, weights, config
        self.trained = trained

    def needs_grad(self, node: Node) -> bool:
        """Whether a gradient flows to or through `node`, as far as operands tell."""
        seen, stack = {node}, [node]
        while stack:
            n = stack.pop()
            if n in self.trained:
                return True
            new = [m for m in n.all_input_nodes if m not in seen]
            seen.update(new)
            stack.extend(new)
        return False

    @functools.cached_property
    def heads(self) -> Heads:
        return find_heads(self.graph, self.weights)

    @functools.cached_property
    def regions(self) -> Regions:
        return regions(self.graph)


class Pass(Protocol):
    """A module in `passes/` that defines these names.

    name: the report's name and the file's; op: the semantic op it makes; after: passes that must have run before.
    A pass that runs only where it is asked for says `by_default = False`.
    find: pure; yields what it found and what it nearly found, in graph order.
    """

    name: str
    op: str
    after: tuple[str, ...]

    def find(self, view: GraphView) -> Iterator[Match | MatchFailure]: ...
