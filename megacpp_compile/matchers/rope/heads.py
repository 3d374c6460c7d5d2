"""Every head of a graph that RoPE rotates: its node, what that is computed from, and which attention reads it."""

from __future__ import annotations

import dataclasses

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.mode_states import ModeStates, mode_states
from megacpp_compile.fx.views import (
    RESHAPES,
    is_reshape,
)
from megacpp_compile.matchers.attention import Reader, readers
from megacpp_compile.matchers.rope.activations import activations, handed_in
from megacpp_compile.matchers.rope.frozen_tables import frozen_tables
from megacpp_compile.matchers.rope.kinds import broadcast_dims, has_plain_lanes, kind_of, shares_a_row
from megacpp_compile.matchers.rope.lane_interpreter import LaneInterpreter
from megacpp_compile.matchers.rope.lane_rules import RULES
from megacpp_compile.matchers.rope.lanes import Lanes
from megacpp_compile.matchers.rope.replaceable import not_replaceable
from megacpp_compile.matchers.rope.rotation import NoRotation, Part, Rotation, read_rotation
from megacpp_compile.matchers.rope.tables import changes_unit_dims
from megacpp_compile.matchers.views import cut_from
from megacpp_compile.reader.links import chain

# What is looked through for the view that took heads apart; other copies and casts of a projection end the search.
_TRACED = RESHAPES | {aten.transpose.int, aten.permute.default, aten.clone.default, aten._to_copy.default}
# Nodes that can finish a rotation: they put two terms or two runs of lanes together.
_COMBINERS = {
    aten.cat.default,
    aten.stack.default,
    aten.slice_scatter.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.addcmul.default,
    aten.select_scatter.default,
    *RESHAPES,
}


@dataclasses.dataclass
class Head:
    """A node whose last dimension is a head with rotated lanes.

    kind: "full" every lane turns; "partial" nope and rope lanes of one tensor; "shared" the rope lanes are one row
    broadcast over the heads (MLA keys); "separate" two tensors with the same leading dimensions.
    """

    root: Node
    lanes: Lanes
    rotation: Rotation
    cone: set[Node]
    kind: str
    readers: list[Reader]

    @property
    def main(self) -> Part:
        return self.rotation.main

    def role(self) -> str:
        """ "q", "k", or "" where the graph does not tell."""
        return _role(self.readers)


def _role(read: list[Reader]) -> str:
    sides = {r.side for r in read}
    return "q" if sides & {"q", "0"} else "k" if sides & {"k", "1"} else ""


@dataclasses.dataclass(frozen=True)
class NearHead:
    """A value that multiplies lanes by tables and is no rotation, or one that may not be touched.

    mla: some of its lanes are not rotated, and it is a key with one row for all heads or meets such keys.
    """

    node: Node
    tag: str
    reason: str
    role: str
    mla: bool


@dataclasses.dataclass
class Heads:
    found: list[Head]
    near: list[NearHead]

    def partners(self, head: Head) -> list[Head]:
        """The heads read as the other operand by the same score product."""
        sides = {(r.node, r.side) for r in head.readers}
        nodes = {n for n, _ in sides}
        return [
            h
            for h in self.found
            if h is not head and any(r.node in nodes and (r.node, r.side) not in sides for r in h.readers)
        ]


def find_heads(graph: fx.Graph, weights: frozenset[Node]) -> Heads:
    """Every RoPE'd head, outermost form: the concat with the unrotated lanes where there is one."""
    acts, states = activations(graph, weights), mode_states(graph)
    it = LaneInterpreter(RULES, acts, states)
    heads, near = _scan(graph, it, acts)
    if inputs := handed_in(graph, weights):
        wider = activations(graph, weights | inputs)
        other = LaneInterpreter(RULES, wider, states)
        found = _scan(graph, other, wider)
        if _joined(found[0]) > _joined(heads):
            it, acts, (heads, near) = other, wider, found
    if it.scaled:  # by a mask or a temperature, perhaps, and what is scaled is what turns
        other = LaneInterpreter(RULES, acts, states, frozenset(it.scaled))
        found = _scan(graph, other, acts)
        if _joined(found[0]) > _joined(heads):
            it, (heads, near) = other, found
    # A view that ends in (2, d) is two heads or the two halves of one; only what follows tells, so every reading is
    # tried: such views of one width d are the same kind of view.
    split = [n for n in graph.nodes if n in acts and _splits_heads(n)]
    widths = {_width(n) for n in split}
    readings = (widths, *({w} for w in widths), *(widths - {w} for w in widths))
    for heads_of in dict.fromkeys(map(frozenset, readings)):
        stops = frozenset(n for n in split if _width(n) in heads_of)
        if stops:
            other = LaneInterpreter(RULES, acts, states, stops | it.stops)
            found = _scan(graph, other, acts)
            if _joined(found[0]) > _joined(heads):
                it, (heads, near) = other, found
    result = _finish(it, heads, near, states, weights)
    result.near += _by_trained_tables(graph, weights, states, {head.root for head in result.found})
    return result


def _by_trained_tables(
    graph: fx.Graph, weights: frozenset[Node], states: ModeStates, known: set[Node]
) -> list[NearHead]:
    """What would be a head if the tables or frequencies that a parameter holds were not trained."""
    tables = frozen_tables(graph, weights, frozenset())
    if not tables:
        return []
    acts = activations(graph, weights - tables)
    found = _scan(graph, LaneInterpreter(RULES, acts, states), acts)[0]
    reason = "its cosines and sines, or their frequencies, are trained, and no op makes a gradient of them"
    rest = weights - tables
    return [NearHead(n, "trained-tables", reason, _role(readers(n, rest)), False) for n, _ in found if n not in known]


def _width(node: Node) -> int:
    return int(value(node).shape[-1])


def _joined(heads: list[tuple[Node, Rotation]]) -> tuple[int, int]:
    return sum(r.nope is not None for _, r in heads), len(heads)


def _scan(
    graph: fx.Graph, it: LaneInterpreter, acts: set[Node]
) -> tuple[list[tuple[Node, Rotation]], list[tuple[Node, NoRotation]]]:
    heads, near, covered = [], [], set[Node]()
    for node in reversed(graph.nodes):
        if node.target not in _COMBINERS or node not in acts or node in covered or changes_unit_dims(node):
            continue
        lanes = it(node)
        if lanes is None or it.opaque(node) or not lanes.rotated:
            continue
        rotation = read_rotation(it, lanes)
        if isinstance(rotation, Rotation):
            if is_reshape(node) and broadcast_dims(lanes, rotation.main):
                continue  # the one key head of many query heads, repeated: what is rotated lies before the view
            heads.append((node, rotation))
            covered |= it.cone(node)
        elif rotation.near:
            near.append((node, rotation))
    return heads[::-1], near[::-1]


def _splits_heads(node: Node) -> bool:
    """Whether `node` is a view ending in (2, d) with no other split before it: two heads, or the two halves of one."""
    if not _splits(node):
        return False
    return not any(_splits(n) or _head_view(n) for n in chain(node, cut_from, _TRACED)[1:])


def _splits(node: Node) -> bool:
    if not is_reshape(node):
        return False
    new, old = ([n for n in value(x).shape if not (isinstance(n, int) and n == 1)] for x in (node, node.args[0]))
    return len(new) > len(old) and new[-2] == 2 and isinstance(new[-1], int) and new[-1] > 2


def _head_view(node: Node) -> bool:
    """Whether `node` is a view that splits or merges the last dimension."""
    return is_reshape(node) and not same_size(value(node).shape[-1], value(node.args[0]).shape[-1])


def _finish(
    it: LaneInterpreter, heads: list[tuple[Node, Rotation]], near: list[tuple[Node, NoRotation]], states: ModeStates,
    weights: frozenset[Node],
) -> Heads:  # fmt: skip
    found, missed, used = [], [], set[Node]()
    mla = any(shares_a_row(it, lanes) for node, _ in (*heads, *near) if (lanes := it(node)) is not None)
    for node, rotation in heads:
        lanes, cone = it(node), it.cone(node)
        assert lanes is not None
        used |= cone
        failure = not_replaceable(it, node, lanes, rotation, cone, states)
        read = readers(node, weights)
        head = Head(node, lanes, rotation, cone, kind_of(lanes, rotation), read)
        if failure is None:
            found.append(head)
        else:
            missed.append(NearHead(*failure, head.role(), mla and rotation.nope is not None))
    # Of nested near misses the outermost speaks, and none that is part of a head.
    roots = {node for node, _ in heads}
    for node, why in reversed(near):
        rotated_before = why.tag == "two-tables" and not roots.isdisjoint(it.cone(node))
        if node not in used and not rotated_before:
            used |= it.cone(node)
            found = [head for head in found if head.readers or head.root not in it.cone(node)]  # parts of this one
            role = _role(readers(node, weights))
            missed.append(NearHead(node, why.tag, why.reason, role, mla and has_plain_lanes(it(node))))
    return Heads(found, missed)
