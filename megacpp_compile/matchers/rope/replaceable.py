"""Whether an op may stand in the place of a proved rotation."""

from __future__ import annotations

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.mode_states import ModeStates
from megacpp_compile.fx.views import SHAPE_ONLY
from megacpp_compile.fx.walks import descendants
from megacpp_compile.matchers.rope.kinds import broadcast_dims, kind_of
from megacpp_compile.matchers.rope.lane_interpreter import LaneInterpreter
from megacpp_compile.matchers.rope.lanes import Lanes, is_one, precision
from megacpp_compile.matchers.rope.rotation import Part, Rotation

_ARITHMETIC = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)


def not_replaceable(
    it: LaneInterpreter, root: Node, lanes: Lanes, rotation: Rotation, cone: set[Node], states: ModeStates
) -> tuple[Node, str, str] | None:
    """(node, tag, reason) where an op may not replace a proved rotation; else None."""
    parts = [p for p in (rotation.nope, rotation.rope) if p]
    shared = kind_of(lanes, rotation) == "shared"
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
            if outside and not (shared and _is_rotated_row(node, root, cone)):
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
    if broadcast_dims(lanes, rotation.main):
        return root, "broadcast", "the unrotated lanes are broadcast over a leading dimension"
    return None


def _needs(it: LaneInterpreter, node: Node, parts: list[Part]) -> int:
    """The precision that `node` needs: of lanes that have not met a table, that of the tensor they are lanes of."""
    lanes = it(node)
    sources = {p.source for p in parts}
    if lanes is not None and not lanes.rotated:
        ids = {int(i) for t in lanes.terms for i in np.unique(t.src[t.coef != 0]) if i >= 0}
        sources = {it.sources[i] for i in ids} or sources
    return max(precision(value(s.node).dtype) for s in sources)


def _is_rotated_row(node: Node, root: Node, cone: set[Node]) -> bool:
    """Whether `node` is the row that all heads share, rotated and not yet theirs: a head's worth, which a cache has."""
    wide = [sum(not is_one(size) for size in value(n).shape) for n in (node, root)]
    rotated = (n for n in descendants([node], cone.__contains__) if n is not node)
    return wide[0] < wide[1] and not any(n.target in _ARITHMETIC for n in rotated)
