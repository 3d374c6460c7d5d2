"""RoPE of ordinary (grouped-query) attention: queries and keys of one attention, rotated by the same tables.

Before: `q, k = rope(q, cos, sin), rope(k, cos, sin)` in any spelling, over the whole head or channels at one end of it
After:  `q, k = megacpp.rope_qk(q, k, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, inverse, dtype)`

Safe for the reason `mla_rope_q` is.
A number that either is multiplied by alone, behind or before it turns, is multiplied behind the op.
Refused: queries and keys with different tables or layouts; a rotation that escapes, or that no GEMM of queries with
keys reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.aliasing import memory_of
from megacpp_compile.fx.edit import Builder, place, same_size, value
from megacpp_compile.fx.views import AUTOCAST_BLIND
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.attention import is_attended, leaves_graph
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.rope.heads import Head
from megacpp_compile.matchers.rope.rotation import Rotation, Table
from megacpp_compile.passes._rewrites import rotations
from megacpp_compile.passes._rewrites.packed import operands, packed
from megacpp_compile.passes._rule import REGION, Match
from megacpp_compile.passes.mla_rope_q import is_mla_key

name = "rope_qk"
op = "megacpp::rope_qk"
after = ("mla_rope_q", "mla_rope_kv")


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    yield from rotations.refusals(view, name)
    done: set[Node] = set()
    for q in view.heads.found:
        if q.kind not in ("full", "partial") or q.root in done or q.role() != "q":
            continue
        partners = [k for k in view.heads.partners(q) if k.root not in done]
        if not partners or any(is_mla_key(k) for k in partners):
            continue
        checked = [(k, _check(view, q, k)) for k in partners]
        k, found = next(((k, one) for k, one in checked if isinstance(one, Match)), checked[0])
        if isinstance(found, Match):
            done |= {q.root, k.root}
        if found is not None:
            yield found
    rows = _rotated_by_ops(view)
    for head in view.heads.found:
        attended = is_attended(head.rotation.rope.source.node, view.weights)  # rotated back, as values were rotated
        by_ops = memory_of(head.rotation.rope.source.node) in rows or rotations.meets_latents(head.root)
        if head.kind in ("full", "partial") and not head.readers and not attended and not by_ops:
            left = "the graph ends before a" if leaves_graph(head.root) else "no"
            yield MatchFailure(
                head.root, "no-scores", f"{left} GEMM of queries with keys that reads what is rotated here"
            )


def _rotated_by_ops(view: GraphView) -> set[Node]:
    """The memory of rows that ops have rotated into keys: what turns one once more is what a cache reads."""
    ops = view.graph.find_nodes(op="call_function", target=torch.ops.megacpp.mla_rope_kv.default)
    return {memory_of(n.args[1]) for n in ops}


def _dimension_without(k: Head, q: Head) -> int | None:
    """The dimension of the heads that `k`, the one key head of many query heads, is without: where all sizes and the
    rows of the tables are those of `q` with it."""
    sizes = [[s for s, kind in zip(h.lanes.sizes, h.lanes.kinds, strict=True) if kind == "o"] for h in (q, k)]
    if len(sizes[0]) != len(sizes[1]) + 1 or rotations.strides_show(k.root):
        return None
    for at in reversed(range(len(sizes[0]))):
        longer = rotations.with_dimension(k.rotation, at)
        same = all(map(same_size, sizes[1], sizes[0][:at] + sizes[0][at + 1 :]))
        if same and all(
            a.source.dims == b.source.dims for a, b in ((q.rotation.cos, longer.cos), (q.rotation.sin, longer.sin))
        ):
            return at
    return None


def _places(table: Table) -> list[Any]:
    """The sizes of what a table has entries for."""
    shape = value(table.source.node).shape
    return [shape[d] for d in table.source.dims if d >= 0]


def _same_entries(a: Table, b: Table) -> bool:
    same = (a.start, a.step, a.width) == (b.start, b.step, b.width)
    return same and a.source.node is b.source.node and a.source.part == b.source.part


def _ratio(a: Rotation, b: Rotation) -> float | None:
    """What the tables of `a` are multiplied by, of those of `b`; None where they are not the same tables."""
    if not _same_entries(a.cos, b.cos) or not _same_entries(a.sin, b.sin):
        return None
    cos, sin = a.cos.factor / b.cos.factor, a.sin.factor / b.sin.factor
    return cos if math.isclose(cos, sin, rel_tol=1e-12) else None


def _with_factor(rotation: Rotation, by: float) -> Rotation:
    tables = {n: getattr(rotation, n) for n in ("cos", "sin")}
    return dataclasses.replace(rotation, **{n: dataclasses.replace(t, factor=t.factor * by) for n, t in tables.items()})


def _times(build: Builder, node: Node, number: float) -> Node:
    return node if number == 1 else build(aten.mul.Tensor, node, number)


@or_failure
def _check(view: GraphView, q: Head, k: Head) -> Match | MatchFailure | None:
    """None where keys have positions of their own, other in number: no tables could serve both."""
    a, b = q.rotation, k.rotation
    lone = _dimension_without(k, q)
    if lone is not None:
        b = rotations.with_dimension(b, lone)
    ratio = _ratio(a, b)
    if ratio is None or ratio != 1 and a.nope is not None:  # lanes that do not turn are not multiplied
        places = [_places(a.cos), _places(b.cos)]
        count = min(map(len, places))  # one of them may have entries for each sequence of a batch
        if places[0][-count:] != places[1][-count:]:
            return None
        return MatchFailure(k.root, "tables", "queries and keys are rotated by different tables")
    nope = [r.nope.width if r.nope else 0 for r in (a, b)]
    refuse_if(
        rotations.layout(a) != rotations.layout(b) or nope[0] != nope[1] or value(q.root).dtype != value(k.root).dtype,
        k.root, "layout", "queries and keys are laid out differently",
    )
    refuse_if(
        len(a.rope.source.dims) != len(b.rope.source.dims) or k.kind not in ("full", "partial"),
        k.root, "layout", "queries and keys are laid out differently",
    )
    refuse_if(
        a.cos.source.dims != b.cos.source.dims or a.sin.source.dims != b.sin.source.dims,
        k.root, "layout", "the tables meet queries and keys in different dimensions",
    )
    by_position = packed(q, k) if b is k.rotation else None
    tables = by_position.sources if by_position else None
    factors = [r.cos.factor for r in (a, b)]
    shared = 1.0 if 1 in factors else factors[0]  # what both are multiplied by is in the tables, the rest behind the op
    inputs = list(dict.fromkeys(rotations.sources(a, tables) + rotations.sources(b, tables)))
    outputs, states = [q.root, k.root], view.mode_states
    if states[q.root].grad != states[k.root].grad or place(inputs, outputs, q.root, states, AUTOCAST_BLIND) is None:
        return MatchFailure(max(outputs), *REGION)

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        rotated, order, offsets = operands(build, by_position, q, *([k] if b is k.rotation else []))
        rotated = _with_factor(rotated, shared / factors[0])
        node = build(
            torch.ops.megacpp.rope_qk.default,
            rotations.whole_head(build, rotated), rotations.whole_head(build, rotations.reordered(b, order)),
            rotations.table(build, rotated.cos), rotations.table(build, rotated.sin),
            nope[0], *rotations.layout(a), False, value(q.root).dtype, *offsets,
        )  # fmt: skip
        rotated_q, rotated_k = (
            rotations.back(build, _times(build, build.item(node, i), factors[i] / shared), order, q if i == 0 else k)
            for i in range(2)
        )
        return node, [rotated_q, rotated_k if b is k.rotation else build(aten.squeeze.dims, rotated_k, [lone])]

    return Match(q.root, inputs, outputs, rewrite, autocast_blind=AUTOCAST_BLIND)
