"""Keys of multi-latent attention: the up-projected latent with one rotated, shared row behind every head.

Before: `k_nope, v = kv.split([n, d], -1); k = cat((k_nope, rope(k_pe, cos, sin).expand(heads)), -1)`, or written
        into an empty tensor slice by slice, in any spelling of RoPE
After:  `k, v = megacpp.mla_rope_kv(kv, k_pe, cos, sin, n, interleaved_in, interleaved_out, rope_first, dtype)`

Safe for the reason `mla_rope_q` is. V belongs to the op so that backward writes one gradient for kv, without a concat.
A cache of the rotated row has the model's own, which stays: a head's worth.
Refused: anything but a rotation; rope keys that are not shared (own heads); one row rotated by tables that differ
where it is shared, as by head, whose gradient is no longer that of a sum over heads; a product that escapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, place, value
from megacpp_compile.fx.views import AUTOCAST_BLIND, SPLITS
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.rope.heads import Head
from megacpp_compile.matchers.rope.kinds import broadcast_beside
from megacpp_compile.matchers.views import is_outer_view, lane_slice
from megacpp_compile.passes._rewrites import rotations
from megacpp_compile.passes._rewrites.packed import Packed, operands, packed
from megacpp_compile.passes._rule import REGION, Match
from megacpp_compile.passes.mla_rope_q import is_mla_key
from megacpp_compile.reader.dims import permuted

name = "mla_rope_kv"
op = "megacpp::mla_rope_kv"
after = ("mla_rope_q",)


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    yield from rotations.refusals(view, name)
    for head in view.heads.found:
        if is_mla_key(head):
            yield _check(view, head)


@or_failure
def _check(view: GraphView, head: Head) -> Match | MatchFailure:
    rotation = head.rotation
    assert rotation.nope is not None
    refuse_if(
        _rotated_apart(head), head.root, "table-rows", "the shared rope key is rotated by tables that differ by head"
    )
    values = _values(head)
    by_position = packed(head)
    inputs = rotations.sources(rotation, by_position.sources if by_position else None)
    outputs = [head.root, *(v for v, _ in values)]
    if place(inputs, outputs, head.root, view.mode_states, AUTOCAST_BLIND) is None:
        values, outputs = [], [head.root]  # V's readers can't move: make the keys alone
        refuse_if(place(inputs, outputs, head.root, view.mode_states, AUTOCAST_BLIND) is None, head.root, *REGION)
    rewrite = partial(_rewrite, head=head, values=values, by_position=by_position)
    return Match(head.root, inputs, outputs, rewrite, autocast_blind=AUTOCAST_BLIND)


def _rotated_apart(head: Head) -> bool:
    """Whether a table differs along a dimension that the rope key is broadcast over."""
    row, tables = head.rotation.rope.source, (head.rotation.cos, head.rotation.sin)
    return any(broadcast_beside(head.lanes, table.source, row) for table in tables)


def _values(head: Head) -> list[tuple[Node, list[int]]]:
    """[(node, its dimensions in kv's)] that read exactly the channels behind the keys' of the same tensor: V.

    Empty where kv holds anything else, or has readers of another kind; the op then makes the keys alone.
    """
    nope = head.rotation.nope
    assert nope is not None
    total = value(nope.source.node).shape[-1]
    if nope.start or nope.width == total or len(nope.source.lane_dims) != 1:
        return []
    values: list[tuple[Node, list[int]]] = []
    rank = value(nope.source.node).dim()
    stack = [(nope.source.node, list(range(rank)), 0, total)]
    while stack:
        node, dims, at, width = stack.pop()
        for user in node.users:
            pieces = list(user.users) if user.target in SPLITS else [user]
            for piece in pieces:
                cut = lane_slice(piece)
                if cut is not None and cut[0] is node:
                    lo, n = at + cut[1], cut[2]
                    if (lo, n) == (nope.width, total - nope.width):
                        values.append((piece, dims))
                    elif lo + n <= nope.width:
                        if not all(u in head.cone for u in piece.users) and piece not in head.cone:
                            return []
                    else:
                        return []
                elif piece.target in (aten.transpose.int, aten.permute.default) and is_outer_view(piece):
                    stack.append((piece, permuted(piece, dims), at, width))
                elif piece not in head.cone:
                    return []
    return values




def _rewrite(
    build: Builder, head: Head, values: list[tuple[Node, list[int]]], by_position: Packed | None
) -> tuple[Node, list[Node]]:
    rotation, order, offsets = operands(build, by_position, head)
    nope, rope = rotation.nope, rotation.rope
    assert nope is not None
    if values:
        kv = rotations.arrange(build, nope.source, 0, value(nope.source.node).shape[-1])
    else:
        kv = rotations.part(build, nope)
    node = build(
        torch.ops.megacpp.mla_rope_kv.default,
        kv, rotations.part(build, rope), rotations.table(build, rotation.cos),
        rotations.table(build, rotation.sin), nope.width, *rotations.layout(rotation), value(head.root).dtype,
        *offsets,
    )  # fmt: skip
    new = [rotations.back(build, build.item(node, 0), order, head)]
    if values:
        v = build.item(node, 1)
        # V has the keys' dimensions; its readers want kv's, which may have others of size 1.
        v = build.squeezed(v, [i for i, d in enumerate(nope.source.dims) if d < 0])
        own = [d for d in nope.source.dims if d >= 0]
        for d in range(value(nope.source.node).dim() - 1):
            if d not in own:
                v = build(aten.unsqueeze.default, v, len(own))
                own.append(d)
        new += [build.permuted(v, [*(own.index(d) for d in dims[:-1]), len(own)]) for _, dims in values]
    return node, new
