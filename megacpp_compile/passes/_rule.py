"""What a pass is, and the match that it yields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

from torch.fx import Node

from megacpp_compile.fx.edit import Builder
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView

# (tag, reason) of a match whose op has no place in the graph.
REGION = ("region", "its inputs are ready only under another grad or autocast mode")


@dataclasses.dataclass
class Match:
    """An idiom found. `inputs` and `outputs` bound the plain subgraph; the op takes the modes of `node`.

    rewrite: emits, by the builder it is given, what computes `outputs` from `inputs`; returns the op's node and the
    nodes that are to carry `outputs`, in order. The driver has chosen the place, and puts them there.
    """

    node: Node
    inputs: list[Node]
    outputs: list[Node]
    rewrite: Callable[[Builder], tuple[Node, list[Node]]]


class Pass(Protocol):
    """A module in `passes/` that defines these names.

    name: the report's name and the file's; op: the semantic op it makes; after: passes that must have run before.
    A pass that runs only where it is asked for says `by_default = False`.
    find: changes neither the graph nor a node's meta; yields what it found and what it nearly found, in graph order.
    """

    name: str
    op: str
    after: tuple[str, ...]

    def find(self, view: GraphView) -> Iterator[Match | MatchFailure]: ...
