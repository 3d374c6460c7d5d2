"""What a pass is, and the match that it yields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Protocol, TypeVar

from torch.fx import Node

from megacpp_compile.fx.edit import Builder
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView

T = TypeVar("T")

# (tag, reason) of a match whose op has no place in the graph.
REGION = ("region", "its inputs are ready only under another grad or autocast mode")


def in_other_modes(view: GraphView, nodes: Iterable[Node], root: Node, autocast: bool = True) -> MatchFailure | None:
    """The first of `nodes` that runs under another grad mode than `root` or, with `autocast`, another autocast mode, as
    a reason to leave them."""
    there = view.mode_states[root]
    for node in nodes:
        here = view.mode_states[node]
        if here.grad != there.grad or autocast and here != there:
            modes = "grad or autocast mode" if autocast else "grad mode"
            return MatchFailure(node, "region", f"part of it runs under another {modes}")
    return None


@dataclasses.dataclass
class Match:
    """An idiom found. `inputs` and `outputs` bound the plain subgraph; the op takes the modes of `node`.

    rewrite: emits, by the builder it is given, what computes `outputs` from `inputs`; returns the op's node and the
    nodes that are to carry `outputs`, in order. The driver has chosen the place, and puts them there. A registered
    rule may return the one node that carries its one output.
    autocast_blind: the ops that may change their autocast region as the op may; none where autocast decides what the
    rewrite emits.
    note: what was decided, for the report. forward_only: nothing differentiates it, and its op has no gradient.
    row_offsets: the input with cumulative row counts; the original leaves rows past `row_offsets[-1]` uninitialised.
    None where every row is written.
    estimated: inputs whose gradient is an estimate of the plain one, and from how many random directions.
    freed_activation: an input that the original subgraph saves for backward and the fused op does not.
    draws: what draws random numbers in the plain subgraph, in place of which the rewrite draws others.
    """

    node: Node
    inputs: list[Node]
    outputs: list[Node]
    rewrite: Callable[[Builder], Any]
    row_offsets: Node | None = None
    note: str = ""
    forward_only: bool = False
    estimated: Mapping[Node, int] = dataclasses.field(default_factory=dict)
    freed_activation: Node | None = None
    autocast_blind: Set[Any] = frozenset()
    draws: tuple[Node, ...] = ()


def decided(
    found: Iterable[T | MatchFailure | None], check: Callable[[T], Match | MatchFailure | None]
) -> Iterator[Match | MatchFailure]:
    """The near misses among what a matcher `found`, and what `check` makes of the others, in order."""
    for one in found:
        made = one if one is None or isinstance(one, MatchFailure) else check(one)
        if made is not None:
            yield made


@dataclasses.dataclass(frozen=True)
class Recognised:
    """What a pass knows and leaves as it is written, as its op would do no better: no near miss. `kind`: what it is."""

    node: Node
    kind: str


class Pass(Protocol):
    """A module in `passes/` that defines these names, or a rule that is registered (`_registered.Rule`).

    name: the report's name and the file's; op: the semantic op it makes; after: passes that must have run before.
    A pass that runs only where it is asked for says `by_default = False`.
    find: changes neither the graph nor a node's meta; yields what it found, what it nearly found, and what it knows but
    leaves, in graph order.
    """

    name: str
    op: str
    after: tuple[str, ...]

    def find(self, view: GraphView) -> Iterator[Match | MatchFailure | Recognised]: ...
