"""From lanes to RoPE: is this value a head whose lanes are partly passed through, partly rotated in pairs?

A rotated pair `(y1, y2)` of source lanes `(p, q)` reads

    y1 = x[p] * cos - x[q] * sin
    y2 = x[q] * cos + x[p] * sin

with one cos and one sin table throughout. Everything about the layout (half-split or interleaved pairs, before and
after; table width; which end of the head turns) is read off, not assumed; what fits none of it is refused.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megacpp_compile.matchers.rope.lane_interpreter import LaneInterpreter
from megacpp_compile.matchers.rope.lanes import NONE, SEVERAL, Lanes, Source


@dataclasses.dataclass(frozen=True)
class Part:
    """`width` lanes of `source` from `start` on."""

    source: Source
    start: int
    width: int


@dataclasses.dataclass(frozen=True)
class Table:
    """Entries `start, start + step, ...` (`width` of them) of `source` times `factor`: a sign, and what the rotation is
    multiplied by."""

    source: Source
    start: int
    step: int
    width: int
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A head of `nope.width + rope.width` lanes; `nope` is None where every lane turns."""

    nope: Part | None
    rope: Part
    cos: Table
    sin: Table
    interleaved_in: bool
    interleaved_out: bool
    rope_first: bool

    @property
    def main(self) -> Part:
        """The lanes that have the head's own leading dimensions."""
        return self.nope or self.rope


@dataclasses.dataclass(frozen=True)
class NoRotation:
    """Why a value is none. `near`: it does multiply by tables, so it deserves a mention."""

    tag: str
    reason: str
    near: bool = True


def read_rotation(it: LaneInterpreter, lanes: Lanes) -> Rotation | NoRotation:
    """Classify a value whose one lane dimension comes last."""
    if lanes.complex or lanes.kinds.count("l") != 1 or lanes.kinds[-1] != "l":
        return NoRotation("not-a-head", "the rotated value has no single feature dimension at the end", near=False)
    coef = np.stack([t.coef for t in lanes.terms])
    live = coef != 0
    src = np.where(live, np.stack([t.src for t in lanes.terms]), NONE)
    tab = np.where(live, np.stack([t.tab for t in lanes.terms]), NONE)
    lane = np.stack([t.lane for t in lanes.terms])
    tlane = np.stack([t.tlane for t in lanes.terms])
    count = live.sum(0)
    if (tab == SEVERAL).any():
        paired = (count == 2) & (tab == SEVERAL).any(0)
        reason = "lanes are multiplied by two tables, one after the other, as xPos multiplies them"
        return NoRotation("two-tables", reason, near=bool(paired.any()))
    rotated = np.asarray((tab >= 0).any(0))
    if not rotated.any():
        return NoRotation("no-table", "no lane is multiplied by a table", near=False)
    if (live & (src < 0)).any() or not count.all():
        return NoRotation("unwritten-lanes", "some lanes are never written")
    if ((count != 1) & ~rotated).any() or (count[rotated] != 2).any() or (live & rotated & (tab < 0)).any():
        near = not _scaled_and_shifted(src[:, rotated], live[:, rotated], tab[:, rotated])
        return NoRotation("not-pairwise", "a rotated lane is not a sum of two products with tables", near)
    d = len(rotated)
    first, last = int(np.argmax(rotated)), d - int(np.argmax(rotated[::-1]))
    if not rotated[first:last].all() or (first != 0 and last != d):
        return NoRotation("rotated-middle", "the rotated lanes are not one run at an end of the head")
    # Compact the two live terms of each rotated lane to two rows.
    order = np.argsort(~live, axis=0, kind="stable")

    def rows(a: np.ndarray) -> np.ndarray:
        return np.take_along_axis(a, order, 0)[:2, first:last]

    c, s, ln, tb, tl = rows(coef), rows(src), rows(lane), rows(tab), rows(tlane)
    nope = None
    if last - first < d:
        keep = ~rotated
        pick = np.argmax(live[:, keep], 0)[None]
        one = [np.take_along_axis(a[:, keep], pick, 0)[0] for a in (coef, src, lane)]
        run = _run(it, *one[1:])
        if run is None or (one[0] != 1).any():
            return NoRotation("nope-lanes", "the other lanes are not one run of one tensor, unchanged")
        nope = run
    turn = _pairs(it, c, s, ln, tb, tl)
    if isinstance(turn, NoRotation):
        return turn
    return dataclasses.replace(turn, nope=nope, rope_first=nope is not None and first == 0)


def _scaled_and_shifted(src: np.ndarray, live: np.ndarray, tab: np.ndarray) -> bool:
    """Whether each lane is one product with a table, to which other tensors are added: a scale and a bias."""
    scaled = live & (tab >= 0)
    own = np.take_along_axis(src, np.argmax(scaled, 0)[None], 0)
    once = (scaled.sum(0) == 1) & ((live & (src == own)).sum(0) == 1)
    return bool((once & (live.sum(0) > 1)).all())


def _run(it: LaneInterpreter, src: np.ndarray, lane: np.ndarray) -> Part | None:
    if (src != src[0]).any() or (np.diff(lane) != 1).any():
        return None
    return Part(it.sources[int(src[0])], int(lane[0]), len(lane))


def _pairs(
    it: LaneInterpreter, coef: np.ndarray, src: np.ndarray, lane: np.ndarray, tab: np.ndarray, tlane: np.ndarray
) -> Rotation | NoRotation:
    r = lane.shape[1]
    if r % 2:
        return NoRotation("odd-width", f"the rotated slice is {r} lanes wide")
    if (src != src.flat[0]).any():
        return NoRotation("two-sources", "the rotated lanes come from more than one tensor")
    base = int(lane.min())
    if sorted(set(lane.ravel().tolist())) != list(range(base, base + r)):
        return NoRotation("lanes-lost", "the rotation does not use every lane of its slice exactly")
    for interleaved_out in (False, True):
        y1, y2 = _halves(r, interleaved_out)
        for interleaved_in in (False, True):
            p, q = (base + x for x in _halves(r, interleaved_in))
            # Row of each output lane that reads its own side of the pair ("diagonal": p for y1, q for y2).
            own1, own2 = _row(lane[:, y1], p), _row(lane[:, y2], q)
            if own1 is None or own2 is None:
                continue
            if _row(lane[:, y1], q) is None or _row(lane[:, y2], p) is None:
                continue
            turn = _tables(it, coef, tab, tlane, (y1, own1), (y2, own2), interleaved_out)
            if isinstance(turn, NoRotation):
                return turn
            rope = Part(it.sources[int(src.flat[0])], base, r)
            return Rotation(None, rope, *turn, interleaved_in, interleaved_out, False)
    return NoRotation("pairing", "the lanes are paired neither as halves nor interleaved")


def _halves(r: int, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    i = np.arange(r // 2)
    return (2 * i, 2 * i + 1) if interleaved else (i, i + r // 2)


def _row(lane: np.ndarray, want: np.ndarray) -> np.ndarray | None:
    hit = lane == want
    return np.argmax(hit, 0) if hit.any(0).all() else None


def _tables(
    it: LaneInterpreter,
    coef: np.ndarray,
    tab: np.ndarray,
    tlane: np.ndarray,
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    interleaved_out: bool,
) -> tuple[Table, Table] | NoRotation:
    """(cos, sin) of pairs given as (output lanes, row of the term that reads the lane's own side) for both sides."""
    (y1, own1), (y2, own2) = first, second

    def at(a: np.ndarray, lanes: np.ndarray, row: np.ndarray) -> np.ndarray:
        return a[row, lanes]

    diagonal = [(y1, own1), (y2, own2)]
    across = [(y1, 1 - own1), (y2, 1 - own2)]
    cos_ids = np.concatenate([at(tab, *x) for x in diagonal])
    sin_ids = np.concatenate([at(tab, *x) for x in across])
    if (cos_ids != cos_ids[0]).any() or (sin_ids != sin_ids[0]).any():
        return NoRotation("mixed-tables", "the two halves are not multiplied by the same cos and sin tables")
    same = [(at(tlane, *x) == at(tlane, *y)).any() for x, y in zip(diagonal, across, strict=True)]
    if cos_ids[0] == sin_ids[0] and any(same):
        return NoRotation("one-table", "cos and sin are the same table entries")
    first_sin, second_sin = (at(tlane, *x) for x in across)
    factor, *others = {*np.concatenate([at(coef, *x) for x in diagonal]).tolist()}
    signs = [{*(at(coef, *x) / factor).tolist()} for x in across]
    if cos_ids[0] == sin_ids[0] and not others and signs == [{1.0}, {1.0}] and (first_sin != second_sin).all():
        reason = "each pair is multiplied by a 2 x 2 matrix that is made elsewhere; nothing says that it turns"
        return NoRotation("matrices", reason)
    if others or factor <= 0 or signs not in ([{-1.0}, {1.0}], [{1.0}, {-1.0}]):
        return NoRotation("signs", "the signs are not those of a rotation (x1*cos - x2*sin, x2*cos + x1*sin)")
    cos = _entries(it, int(cos_ids[0]), at(tlane, *diagonal[0]), at(tlane, *diagonal[1]), interleaved_out)
    sin = _entries(it, int(sin_ids[0]), first_sin, second_sin, interleaved_out)
    if cos is None or sin is None:
        return NoRotation("table-order", "the table entries are not in the order of the lanes")
    sign = -1.0 if signs[0] == {1.0} else 1.0
    return dataclasses.replace(cos, factor=factor), dataclasses.replace(sin, factor=sign * factor)


def _entries(
    it: LaneInterpreter, table: int, first: np.ndarray, second: np.ndarray, interleaved_out: bool
) -> Table | None:
    """The table entries of the pairs' two lanes as a half-width or a full-width (output order) strided slice."""
    if (first == second).all():
        entries = first
    else:
        r = 2 * len(first)
        entries = np.empty(r, dtype=first.dtype)
        y1, y2 = _halves(r, interleaved_out)
        entries[y1], entries[y2] = first, second
    step = int(entries[1] - entries[0]) if len(entries) > 1 else 1
    if step < 1 or (np.diff(entries) != step).any():
        return None
    return Table(it.sources[table], int(entries[0]), step, len(entries))
