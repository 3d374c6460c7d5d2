"""Mamba-2's state-space scan, chunk by chunk (arXiv:2405.21060; HF's torch path, the paper's `ssd_minimal_discrete`).

Before: `a = dt * A; L = exp(segsum(a)); Y = (C B^T * L) (x * dt)` within chunks, states of chunks carried by decays of
        their own, `Y + C states`, `+ D * x`, with padding, in any spelling
After:  `y, final_state, states = megacpp.ssd_scan(x, dt, A, B, C, D, initial_state, chunk_size, dtype)`

Safe because the matcher (`matchers/ssd/`) runs the subgraph at small sizes on random operands and compares it with the
recurrence that the op computes; the op computes in float32 or better, and reads x, B and C before they are cast,
repeated for the heads of a group, or padded. The step's softplus, bias and clamp stay in the graph in front of the op.
Refused: other recurrences with decays (another mask, no decay within chunks, a state fed without its step, as in gated
linear attention), intermediates used elsewhere, parts under different grad or autocast modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, place, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.ssd.axes import flat, length
from megacpp_compile.matchers.ssd.chain import joined
from megacpp_compile.matchers.ssd.scan import Leaf, Scan, find_scans
from megacpp_compile.passes._rule import REGION, Match

aten = torch.ops.aten
name = "ssd_scan"
op = "megacpp::ssd_scan"
after: tuple[str, ...] = ()

LEAST_CHUNK, MOST_CHUNK = 16, 256
Groups = Sequence[tuple[Any, ...]]


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    found = list(find_scans(view.graph))
    for scan in joined([f for f in found if isinstance(f, Scan)]):
        yield _check(view, scan)
    for other in found:
        if not isinstance(other, Scan):
            yield MatchFailure(other.node, other.tag, other.reason)


def _check(view: GraphView, scan: Scan) -> Match | MatchFailure:
    root = scan.y.node
    for node in sorted(scan.inside):
        if view.mode_states[node] != view.mode_states[root]:
            return MatchFailure(node, "region", "part of it runs under another grad or autocast mode")
    operands = (scan.x, scan.dt, scan.A, scan.B, scan.C, scan.D, scan.initial_state)
    inputs = list(dict.fromkeys(leaf.node for leaf in operands if leaf is not None))
    outputs = [leaf.node for leaf in (scan.y, *scan.final_states)]
    if place(inputs, outputs, root, view.mode_states) is None:
        return MatchFailure(root, *REGION)

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        b, t, h, p, n = (tuple(flat(d)) for d in (scan.b, scan.t, scan.h, scan.p, scan.n))
        groups = _groups(scan, h)
        node = build(
            torch.ops.megacpp.ssd_scan.default,
            _arrange(build, scan.x, (b, t, h, p)),
            _arrange(build, scan.dt, (b, t, h)),
            _arrange(build, scan.A, (h,)),
            _arrange(build, scan.B, (b, t, groups, n)),
            _arrange(build, scan.C, (b, t, groups, n)),
            scan.D and _arrange(build, scan.D, (h,)),
            scan.initial_state and _arrange(build, scan.initial_state, (b, h, p, n)),
            chunk_size(scan.chunk), value(root).dtype,
        )  # fmt: skip
        new = [_arrange(build, Leaf(build.item(node, 0), (b, t, h, p)), scan.y.dims)]
        for final in scan.final_states:
            state = build.cast(build.item(node, 1), value(final.node).dtype)
            new.append(_arrange(build, Leaf(state, (b, h, p, n)), final.dims))
        return node, new

    return Match(root, inputs, outputs, rewrite)


def chunk_size(model: int) -> int:
    """The model's, as a power of two the op takes; it is free, as it decides only how the scan is computed."""
    return min(MOST_CHUNK, max(LEAST_CHUNK, 1 << max(model - 1, 0).bit_length()))


def _groups(scan: Scan, heads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The atoms of the heads that B and C differ in, if those lead: one group for each; else all heads."""
    own = {a for leaf in (scan.B, scan.C) for d in leaf.dims for a in d}
    first = heads[: sum(a in own for a in heads)]
    return first if set(first) == own & set(heads) else heads


def _arrange(build: Builder, leaf: Leaf, target: Groups) -> Node:
    """`leaf` with the dimensions of `target`, repeated where it lacks an atom; views wherever they will do."""
    node, wanted = leaf.node, [tuple(g) for g in target]
    if list(leaf.dims) == wanted:
        return node
    units = [i for i, d in enumerate(leaf.dims) if not d]
    if units:
        node = build(aten.squeeze.dims, node, units)
    dims = [d for d in leaf.dims if d]
    # Whole dimensions stay whole; the others are taken apart.
    have: list[tuple[Any, ...]] = []
    for d in dims:
        if len(d) == 1 or any(_tokens(g, [d]) for g in wanted):
            have.append(d)
        else:
            node = build(aten.unflatten.int, node, len(have), _sizes(d))
            have += [(a,) for a in d]
    parts = [_tokens(g, have) or [(a,) for a in g] for g in wanted]
    order = [part for group in parts for part in group]
    permutation = [have.index(part) for part in order if part in have]
    if permutation != sorted(permutation):
        node = build(aten.permute.default, node, permutation)
    missing = [i for i, part in enumerate(order) if part not in have]
    if missing:
        for i in missing:
            node = build(aten.unsqueeze.default, node, i)
        node = build(aten.expand.default, node, [length([*part]) if part not in have else -1 for part in order])
    at = 0
    for group in parts:
        if not group:
            node = build(aten.unsqueeze.default, node, at)
        elif len(group) > 1:
            node = build(aten.flatten.using_ints, node, at, at + len(group) - 1)
        at += 1
    return node


def _tokens(group: tuple[Any, ...], dims: Groups) -> Groups | None:
    """`group` as a sequence of single atoms and of `dims`, at least one of these; None where it is not."""
    out: list[tuple[Any, ...]] = []
    at, whole = 0, False
    while at < len(group):
        dim = next((d for d in dims if d == group[at : at + len(d)]), (group[at],))
        whole |= dim in dims
        out.append(dim)
        at += len(dim)
    return out if whole else None


def _sizes(dim: tuple[Any, ...]) -> list[Any]:
    return [a.size if isinstance(a.size, int) else -1 for a in dim]
