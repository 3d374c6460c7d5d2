"""Every head of a graph that RoPE rotates: its node, what that is computed from, and which attention reads it."""

from __future__ import annotations

import dataclasses
import operator

import numpy as np
import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import HigherOrderOperator
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.mode_states import ModeStates, mode_states
from megacpp_compile.fx.views import (
    COMPOSITE_PERMUTATIONS,
    FOLDS,
    PERMUTATIONS,
    RESHAPES,
    SPLITS,
    UNIT_DIMS,
    is_reshape,
)
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.matchers.attention import Reader, readers
from megacpp_compile.matchers.linear import is_projection
from megacpp_compile.matchers.rope.activations import SHAPE_ONLY, activations, handed_in
from megacpp_compile.matchers.rope.frozen_tables import frozen_tables
from megacpp_compile.matchers.rope.lane_interpreter import LaneInterpreter
from megacpp_compile.matchers.rope.lane_rules import RULES
from megacpp_compile.matchers.rope.lanes import NONE, Lanes, Source, is_one, precision
from megacpp_compile.matchers.rope.rotation import NoRotation, Part, Rotation, read_rotation
from megacpp_compile.matchers.rope.tables import changes_unit_dims
from megacpp_compile.matchers.views import is_outer_view, lane_slice

aten = torch.ops.aten
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

    mla: some of its lanes are not turned, and it is a key with one row for all heads or meets such keys.
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
        if lanes is None or it.opaque(node) or not lanes.turned:
            continue
        rotation = read_rotation(it, lanes)
        if isinstance(rotation, Rotation):
            if is_reshape(node) and _broadcast_dims(lanes, rotation.main):
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
    while True:
        part = lane_slice(node)
        if part is None and node.target not in _TRACED:
            return True
        node = part[0] if part is not None else node.args[0]  # type: ignore[assignment]
        if _splits(node) or _head_view(node):
            return False


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
    mla = any(_shares_a_row(it, lanes) for node, _ in (*heads, *near) if (lanes := it(node)) is not None)
    for node, rotation in heads:
        lanes, cone = it(node), it.cone(node)
        assert lanes is not None
        used |= cone
        failure = _not_replaceable(it, node, lanes, rotation, cone, states)
        read = readers(node, weights)
        head = Head(node, lanes, rotation, cone, _kind(lanes, rotation), read)
        if failure is None:
            found.append(head)
        else:
            missed.append(NearHead(*failure, head.role(), mla and rotation.nope is not None))
    # Of nested near misses the outermost speaks, and none that is part of a head.
    roots = {node for node, _ in heads}
    for node, why in reversed(near):
        turned_before = why.tag == "two-tables" and not roots.isdisjoint(it.cone(node))
        if node not in used and not turned_before:
            used |= it.cone(node)
            found = [head for head in found if head.readers or head.root not in it.cone(node)]  # parts of this one
            role = _role(readers(node, weights))
            missed.append(NearHead(node, why.tag, why.reason, role, mla and _has_plain_lanes(it(node))))
    return Heads(found, missed)


def _has_plain_lanes(lanes: Lanes | None) -> bool:
    if lanes is None:
        return False
    live = sum((t.coef != 0) & (t.tab != NONE) for t in lanes.terms)
    return bool((live == 0).any())


def _kind(lanes: Lanes, rotation: Rotation) -> str:
    nope, rope = rotation.nope, rotation.rope
    if nope is None:
        return "full"
    if nope.source == rope.source:
        return "partial"
    return "shared" if broadcast_beside(lanes, nope.source, rope.source) else "separate"


def _shares_a_row(it: LaneInterpreter, lanes: Lanes) -> bool:
    """Whether some turned lanes are one row for all heads, beside lanes of each head's own that are not turned."""
    own, rows = set[int](), set[int]()
    for t in lanes.terms:
        own |= {int(i) for i in np.unique(t.src[(t.coef != 0) & (t.tab == NONE)]) if i >= 0}
        rows |= {int(i) for i in np.unique(t.src[(t.coef != 0) & (t.tab != NONE)]) if i >= 0}
    return any(broadcast_beside(lanes, it.sources[a], it.sources[b]) for a in own for b in rows)


def broadcast_beside(lanes: Lanes, own: Source, row: Source) -> bool:
    """Whether `row` is broadcast over a leading dimension that `own` has."""
    outer = [s for s, k in zip(lanes.sizes, lanes.kinds, strict=True) if k == "o"]
    return any(b < 0 <= a and not is_one(s) for s, a, b in zip(outer, own.dims, row.dims, strict=True))


def _needs(it: LaneInterpreter, node: Node, parts: list[Part]) -> int:
    """The precision that `node` needs: of lanes that have not met a table, that of the tensor they are lanes of."""
    lanes = it(node)
    sources = {p.source for p in parts}
    if lanes is not None and not lanes.turned:
        ids = {int(i) for t in lanes.terms for i in np.unique(t.src[t.coef != 0]) if i >= 0}
        sources = {it.sources[i] for i in ids} or sources
    return max(precision(value(s.node).dtype) for s in sources)


def _not_replaceable(
    it: LaneInterpreter, root: Node, lanes: Lanes, rotation: Rotation, cone: set[Node], states: ModeStates
) -> tuple[Node, str, str] | None:
    """(node, tag, reason) where an op may not replace a proved rotation; else None."""
    parts = [p for p in (rotation.nope, rotation.rope) if p]
    shared = _kind(lanes, rotation) == "shared"
    for node in sorted(cone):
        fake = value(node)
        if not isinstance(fake, torch.Tensor):
            continue
        if precision(fake.dtype) < _needs(it, node, parts):
            return node, "precision", f"computed in {fake.dtype}, lower than its operand's precision"
        if states[node].grad != states[root].grad:  # of what lanes are made, nothing is changed by autocast
            return node, "region", "part of it runs under another grad mode"
        # Views, copies and casts cost nothing to be read twice; these would be computed twice.
        if node is not root and node.target in _ARITHMETIC:
            outside = [u for u in node.users if u not in cone and u.target not in SHAPE_ONLY]
            if outside and not (shared and _is_turned_row(node, root, cone)):
                return node, "escapes", f"an intermediate is used elsewhere too ({outside[0].name})"
    nope, rope = rotation.nope, rotation.rope
    if nope is not None and nope.source == rope.source:
        ends = {nope.start + nope.width - rope.start, rope.start + rope.width - nope.start}
        if 0 not in ends:
            return root, "rope-place", "the rotated and the other lanes are not neighbours in their tensor"
    outer = [s for s, k in zip(lanes.sizes, lanes.kinds, strict=True) if k == "o"]
    tables = (rotation.cos.source, rotation.sin.source)
    if all(d < 0 for t in tables for d in t.dims) and not any(isinstance(s, int) and s == 1 for s in outer):
        return root, "table-length", "one table row serves every position"
    if _broadcast_dims(lanes, rotation.main):
        return root, "broadcast", "the unrotated lanes are broadcast over a leading dimension"
    return None


_ARITHMETIC = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)


def _is_turned_row(node: Node, root: Node, cone: set[Node]) -> bool:
    """Whether `node` is the row that all heads share, turned and not yet theirs: a head's worth, which a cache has."""
    wide = [sum(not is_one(size) for size in value(n).shape) for n in (node, root)]
    pending, seen = [node], {node}
    while pending:
        new = [u for u in pending.pop().users if u in cone and u not in seen]
        if any(u.target in _ARITHMETIC for u in new):
            return False
        seen.update(new)
        pending += new
    return wide[0] < wide[1]


def _broadcast_dims(lanes: Lanes, part: Part) -> list[int]:
    """The outer dimensions of a head over which `part` is broadcast."""
    outer = [s for s, k in zip(lanes.sizes, lanes.kinds, strict=True) if k == "o"]
    dims = part.source.dims
    return [i for i, (size, dim) in enumerate(zip(outer, dims, strict=True)) if dim < 0 and not is_one(size)]


def _origin(node: Node) -> Node:
    """What `node` is a part or view of; of an op with several results, the op."""
    while True:
        part = lane_slice(node)
        if part is not None:
            node = part[0]
        elif node.target is operator.getitem:
            split = node.args[0]
            node = split.args[0] if split.target in SPLITS | {aten.unbind.int} else split  # type: ignore
        elif is_outer_view(node) or node.target in _MOVES:
            node = node.args[0]  # type: ignore[assignment]
        elif node.target in _SCALINGS and not isinstance(value(node.args[1]), torch.Tensor):
            node = node.args[0]  # type: ignore[assignment]
        else:
            return node


_MOVES = RESHAPES | FOLDS | UNIT_DIMS | PERMUTATIONS | COMPOSITE_PERMUTATIONS
_SCALINGS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def from_projection(part: Part) -> bool:
    """Whether a head's lanes come straight from a linear (or from outside the graph), or between ranks from one."""
    node = _origin(part.source.node)
    while (sent := _sent(node)) is not None:
        node = _origin(sent)
    return node.op == "placeholder" or is_projection(node) or node.target in semantic_ops()


def _sent(node: Node) -> Node | None:
    """What an autograd function or a collective is called with, as where ranks gather or sum what they share."""
    collective = str(getattr(node.target, "namespace", "")) == "_c10d_functional"
    if not collective and not isinstance(node.target, HigherOrderOperator):
        return None
    given = [a for a in node.all_input_nodes if isinstance(value(a), torch.Tensor)]
    return given[0] if len(given) == 1 else None
