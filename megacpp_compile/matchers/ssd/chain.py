"""Scans in a row, joined: a loop that slices the sequence into chunks and scans each from the final state of the one
before is one scan of the whole sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.ssd.atoms import flat
from megacpp_compile.matchers.ssd.roles import Leaf, Scan
from megacpp_compile.reader.parts import part_of


def joined(scans: Sequence[Scan]) -> list[Scan]:
    """`scans` in order, each chain of them whose pieces make up one sequence replaced by one scan."""
    before = {final.node: scan for scan in scans for final in scan.final_states}
    links = [(scan, before.get(scan.initial_state.node)) for scan in scans if scan.initial_state is not None]
    after = {id(first): scan for scan, first in links if first is not None}
    inner = {id(scan) for scan in after.values()}
    found: list[Scan] = []
    for scan in scans:
        if id(scan) in inner:
            continue
        chain = [scan]
        while (following := after.get(id(chain[-1]))) is not None:
            chain.append(following)
        whole = _whole(chain) if len(chain) > 1 else None
        found += chain if whole is None else [whole]
    return found


@or_none
def _whole(chain: Sequence[Scan]) -> Scan | None:
    first, last = chain[0], chain[-1]
    NoMatch.when(any(_shape(scan) != _shape(first) for scan in chain[1:]))
    NoMatch.when(any((s.A.node, s.D and s.D.node) != (first.A.node, first.D and first.D.node) for s in chain))
    operands: dict[str, Any] = {}
    for role in ("x", "dt", "B", "C"):
        source = NoMatch.unless(_cut_from([getattr(scan, role) for scan in chain], [_time(scan) for scan in chain]))
        operands[role] = Leaf(source, getattr(first, role).dims)
    for scan, following in zip(chain, chain[1:], strict=False):
        NoMatch.when(any(u not in following.inside for state in scan.final_states for u in state.node.users))
    y = NoMatch.unless(_put_together([scan.y for scan in chain], _time(first)))
    NoMatch.when(len(last.final_states) > 1)
    ends = [Leaf(final.node, first.final_states[0].dims) for final in last.final_states]
    inside = set[Node]().union(*(scan.inside for scan in chain)) | {scan.y.node for scan in chain}
    return dataclasses.replace(first, y=Leaf(y, first.y.dims), final_states=ends, inside=inside, **operands)


def _time(scan: Scan) -> tuple[object, ...]:
    return tuple(flat(scan.t))


def _shape(scan: Scan) -> list[object]:
    """What each dimension of each operand runs over, by names that all scans share."""
    names: dict[object, tuple[str, int]] = {a: (k, i) for k in "bthpn" for i, a in enumerate(flat(getattr(scan, k)))}
    leaves = (scan.x, scan.dt, scan.A, scan.B, scan.C, scan.D, scan.y)
    return [leaf and [[names.get(a) for a in d] for d in leaf.dims] for leaf in leaves]


def _cut_from(leaves: Sequence[Leaf], times: Sequence[tuple[object, ...]]) -> Node | None:
    """The tensor of which `leaves` are all pieces, in order of time."""
    source, at = None, 0
    for leaf, time in zip(leaves, times, strict=True):
        piece = _piece(leaf.node, leaf.dims.index(time)) if time in leaf.dims else None
        if piece is None or piece[1] != at or (source is not None and piece[0] is not source):
            return None
        source, at = piece[0], piece[2]
        whole = value(source).shape[leaf.dims.index(time)]
    return source if at == whole else None


def _piece(node: Node, dim: int) -> tuple[Node, int, int] | None:
    """(tensor, start, end) where `node` is a run of the tensor's dimension `dim`."""
    part = part_of(node)
    if part is None or not part.is_run or part.dim != dim:
        return None
    numbers = isinstance(part.size, int) and isinstance(part.whole, int)
    return (part.source, part.start, part.start + part.size) if numbers else None


def _put_together(leaves: Sequence[Leaf], time: tuple[object, ...]) -> Node | None:
    """The concatenation, over time, that alone reads `leaves`."""
    users = {u for leaf in leaves for u in leaf.node.users}
    cat = users.pop() if len(users) == 1 else None
    if cat is None or cat.target is not aten.cat.default or time not in leaves[0].dims:
        return None
    dim = cat.args[1] if len(cat.args) > 1 else 0
    in_order = list(cat.args[0]) == [leaf.node for leaf in leaves]  # type: ignore[arg-type]
    along = dim % len(leaves[0].dims) == leaves[0].dims.index(time)  # type: ignore[operator]
    return cat if in_order and along else None
