"""How the lanes of a head lie that RoPE rotates: beside others or alone, each head's own or one row for all."""

from __future__ import annotations

import numpy as np

from megacpp_compile.matchers.rope.lane_interpreter import LaneInterpreter
from megacpp_compile.matchers.rope.lanes import NONE, Lanes, Source, is_one
from megacpp_compile.matchers.rope.rotation import Part, Rotation


def kind_of(lanes: Lanes, rotation: Rotation) -> str:
    """The kind of a head, as `heads.Head` has it."""
    nope, rope = rotation.nope, rotation.rope
    if nope is None:
        return "full"
    if nope.source == rope.source:
        return "partial"
    return "shared" if broadcast_beside(lanes, nope.source, rope.source) else "separate"


def shares_a_row(it: LaneInterpreter, lanes: Lanes) -> bool:
    """Whether some rotated lanes are one row for all heads, beside lanes of each head's own that are not rotated."""
    own, rows = set[int](), set[int]()
    for t in lanes.terms:
        own |= {int(i) for i in np.unique(t.src[(t.coef != 0) & (t.tab == NONE)]) if i >= 0}
        rows |= {int(i) for i in np.unique(t.src[(t.coef != 0) & (t.tab != NONE)]) if i >= 0}
    return any(broadcast_beside(lanes, it.sources[a], it.sources[b]) for a in own for b in rows)


def has_plain_lanes(lanes: Lanes | None) -> bool:
    """Whether some lanes are not rotated."""
    if lanes is None:
        return False
    live = sum((t.coef != 0) & (t.tab != NONE) for t in lanes.terms)
    return bool((live == 0).any())


def broadcast_beside(lanes: Lanes, own: Source, row: Source) -> bool:
    """Whether `row` is broadcast over a leading dimension that `own` has."""
    outer = [s for s, k in zip(lanes.sizes, lanes.kinds, strict=True) if k == "o"]
    return any(b < 0 <= a and not is_one(s) for s, a, b in zip(outer, own.dims, row.dims, strict=True))


def broadcast_dims(lanes: Lanes, part: Part) -> list[int]:
    """The outer dimensions of a head over which `part` is broadcast."""
    outer = [s for s, k in zip(lanes.sizes, lanes.kinds, strict=True) if k == "o"]
    dims = part.source.dims
    return [i for i, (size, dim) in enumerate(zip(outer, dims, strict=True)) if dim < 0 and not is_one(size)]
