"""Which entries of a cos/sin table meet which lanes.

A table is any tensor that is not computed from weights; how it was made does not matter. Views of it do: models slice
one cache into halves, double half-width tables with `cat((f, f))`, or bake the sign in with `cat((-sin, sin))`, and
seen through such views the same entries are the same. A table that is put together of several ones, such as cosines of
rows beside those of columns or matrices of cosines and sines, stays the one that is read: each entry as the first that
is known to be the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import UNIT_DIMS, is_identity, is_reshape
from megacpp_compile.matchers.rope import lanes as L
from megacpp_compile.matchers.rope.lane_dims import as_lane, with_rank
from megacpp_compile.reader.links import through


def table_lanes(it: L.LaneContext, table: Node, x: L.Lanes) -> list[L.Term]:
    """Entries of `table` over x's lane dimensions: one term, or (real, imaginary) for a complex table.

    Raises `Opaque` where the shapes don't meet lane by lane.
    """
    if x.complex:
        return [_direct(it, table, x, part) for part in ("re", "im")]
    seen = _through(it, table, x)
    if seen is not None and (seen.src == seen.src.flat[0]).all() and it.sources[int(seen.src.flat[0])].rounded is None:
        return [seen]
    entries = _direct(it, table, x, "")
    return [entries if seen is None else it.firsts(entries, seen)]


def _direct(it: L.LaneContext, table: Node, x: L.Lanes, part: str) -> L.Term:
    """The table itself as source: its dimensions that meet lanes are its lane dimensions. A complex one is read without
    the views that only insert or drop dimensions of size 1, so that it is the same beside queries and beside keys."""
    shape = value(table).shape
    offset = len(x.kinds) - len(shape)
    base = _without_unit_dims(table) if part else table
    places = _places(table, base)
    dims, lane_dims, lane_sizes = [], [], []
    for dim, kind in enumerate(x.kinds):
        own = dim - offset
        size: Any = shape[own] if own >= 0 else 1
        broadcast = isinstance(size, int) and size == 1
        if kind == "o":
            dims.append(-1 if broadcast else places[own])
            continue
        L.Opaque.when(not broadcast and not same_size(size, x.sizes[dim]))
        lane_sizes.append(1 if broadcast else size)
        if not broadcast:
            lane_dims.append(places[own])
    L.Opaque.when(not lane_dims)
    sid = it.source_id(L.Source(base, tuple(dims), tuple(lane_dims), part))
    return L.term(np.ones(lane_sizes), sid, np.arange(int(np.prod(lane_sizes))).reshape(lane_sizes))


def _without_unit_dims(table: Node) -> Node:
    """What `table` is a view of with dimensions of size 1 inserted or dropped; itself where it is none."""
    return through(table, UNIT_DIMS, is_identity, changes_unit_dims)


def changes_unit_dims(view: Node) -> bool:
    """Whether all that the reshape `view` does is to insert or drop dimensions of size 1."""
    if not is_reshape(view):
        return False
    new, old = ([n for n in value(x).shape if not L.is_one(n)] for x in (view, view.args[0]))
    return len(new) == len(old) and all(map(same_size, new, old))


def _places(table: Node, base: Node) -> list[int]:
    """For each dimension of `table` the one of `base` that it is; -1 for those of size 1."""
    longer = iter([i for i, n in enumerate(value(base).shape) if not L.is_one(n)])
    return [-1 if L.is_one(n) else next(longer) for n in value(table).shape]


def _through(it: L.LaneContext, table: Node, x: L.Lanes) -> L.Term | None:
    """The entries with views of the table resolved; None where that leads nowhere."""
    return next((entries for t in it.table_views(table) if (entries := _meeting(it, t, x)) is not None), None)


@or_none
def _meeting(it: L.LaneContext, t: L.Lanes, x: L.Lanes) -> L.Term | None:
    try:
        NoMatch.when(len(t.terms) != 1)
        t = with_rank(it, t, len(x.kinds))
        for dim, kind in enumerate(x.kinds):
            if t.kinds[dim] != kind:
                NoMatch.when(kind == "o")
                t = as_lane(it, t, dim)
            NoMatch.when(kind == "l" and t.sizes[dim] not in (1, x.sizes[dim]))
        term = t.terms[0]
        return None if (term.src < 0).any() else term
    except L.Opaque:
        return None
