"""Puts what a match emits in the place of the plain subgraph, for one match of a pass after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, move_after, place, replace, same_size, unread_without, value
from megacpp_compile.fx.views import AUTOCAST_BLIND
from megacpp_compile.fx.walks import reached
from megacpp_compile.lowerings._traits import name_of
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse_unless
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.passes._rule import REGION, Match

OVERLAP = "overlap"
Objection = Callable[[GraphView, Match, Node, Sequence[Node], Builder], MatchFailure | None]


def is_semantic(op_node: Node) -> bool:
    """Whether the node of a site has an op that means an idiom, which no other site may take: torch's own, which a rule
    emits, are what passes match."""
    return not name_of(op_node).startswith(("aten::", "prims::"))


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A match that was applied. new: the nodes that carry its outputs. unread: the plain nodes without readers now.
    stamped: fake values of nodes behind the outputs, which lie otherwise now, as they were."""

    match: Match
    op_node: Node
    new: list[Node]
    unread: set[Node]
    stamped: dict[Node, Any]


class Rewriter:
    """Applies matches that were all found in the same graph, while they change it.

    A match whose inputs or outputs overlap an applied one is skipped: it was found in a stale graph. So is one that
    reads from a match which was not applied, as an op's strides may follow those of its operands, nor
    one that would take the op of another site away. ops: the ops' nodes of all sites so far. objection: what is wrong
    with what a match emitted, before anything reads it.
    """

    def __init__(self, view: GraphView, ops: set[Node], objection: Objection | None = None) -> None:
        self.view, self.ops, self.objection = view, ops, objection
        self.unread: set[Node] = set()
        self.waiting: set[Node] = set()

    @or_failure
    def apply(self, match: Match) -> Rewrite | MatchFailure:
        """Replace the match's outputs; a failure, and the graph as it was, where another site is in the way."""
        if not (self.unread | self.waiting).isdisjoint([*match.inputs, *match.outputs]):
            return self._overlap(match)
        view, states = self.view, self.view.mode_states
        where = place(match.inputs, match.outputs, match.node, states, match.autocast_blind)
        anchor, moved = refuse_unless(where, match.node, *REGION)
        build = Builder(view.graph, view.fake_mode, anchor, match.node, states, in_region=self.objection is not None)
        op_node, new = or_refuse(self._emitted(match, build))
        if build.emitted:
            moved = [n for n in moved if not n._erased]
            move_after(moved, build.emitted[-1])
            states |= dict.fromkeys(moved, states[anchor])
        plain = _plain(match)  # an output may be what another is computed from: the plain subgraph stays whole
        for old, node in zip(match.outputs, new, strict=True):
            old.replace_all_uses_with(node, delete_user_cb=lambda user: user not in plain)
        stamped = _stamp(view, match.outputs, new)
        done = Rewrite(match, op_node, new, unread_without(match.outputs, self.unread, match.draws), stamped)
        read = {n for node in build.emitted for n in node.all_input_nodes}
        if not self.unread.isdisjoint(read) or not done.unread.isdisjoint(self.ops):
            self.undo(done)
            return self._overlap(match)
        return done

    def _emitted(self, match: Match, build: Builder) -> tuple[Node, list[Node]] | MatchFailure:
        """What the match's rewrite returns; a failure where that is a rule's, and it fails or is of no use."""
        if self.objection is None:
            return match.rewrite(build)
        problem: MatchFailure | None
        try:
            made = match.rewrite(build)
            op_node, new = (made, [made]) if isinstance(made, Node) else made
            problem = self.objection(self.view, match, op_node, new, build)
        except Exception as error:
            if self.view.config.strict:
                raise
            problem = MatchFailure(match.node, "internal-error", f"{type(error).__name__}: {error}"[:300])
        if problem is None:
            return op_node, new
        for node in reversed(build.emitted):
            node.graph.erase_node(node)
        return problem

    def keep(self, done: Rewrite) -> None:
        """Refuse later matches that need what `done` has taken."""
        self.unread = done.unread
        if is_semantic(done.op_node):
            self.ops.add(done.op_node)
        for node in self.unread.intersection(done.match.draws):  # it would be drawn for nobody
            replace(node, node.all_input_nodes[0])

    def undo(self, done: Rewrite) -> None:
        """Let the plain nodes be read again."""
        for node, plain in zip(done.new, done.match.outputs, strict=True):
            node.replace_all_uses_with(plain)
        for node, before in done.stamped.items():
            node.meta["val"] = before

    def _overlap(self, match: Match) -> MatchFailure:
        self.waiting |= _plain(match)
        return MatchFailure(match.node, OVERLAP, "part of it belongs to another site")


def _stamp(view: GraphView, plain: Sequence[Node], new: Sequence[Node]) -> dict[Node, Any]:
    """Give views of `new`, and what is elementwise, fake values with the strides they have now, where those are others
    than behind `plain`; the values before."""
    changed = {n for old, n in zip(plain, new, strict=True) if not _lies_alike(value(old), value(n))}
    before: dict[Node, Any] = {}
    pending = sorted({user for n in changed for user in n.users})
    while pending:
        node = pending.pop(0)
        if node.target not in AUTOCAST_BLIND or not isinstance(value(node), torch.Tensor):
            continue  # products have one layout for any of their operands'; what else there is goes by modes
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with view.fake_mode, torch.no_grad():
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        if not _lies_alike(value(node), made):
            before[node], node.meta["val"] = value(node), made
            pending = sorted({*pending, *node.users})
    return before


def _lies_alike(a: Any, b: Any) -> bool:
    """Whether two tensors of one shape have the same strides, as far as that is known."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True
    return all(same_size(n, 1) or same_size(x, y) for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def _plain(match: Match) -> set[Node]:
    """The nodes that compute the outputs of `match` from its inputs, without these."""
    def plain(nodes: Iterable[Node]) -> list[Node]:
        return [n for n in nodes if n not in match.inputs and n.op == "call_function"]

    return set(reached(plain(match.outputs), lambda n: plain(n.all_input_nodes)))
