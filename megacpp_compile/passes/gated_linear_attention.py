"""Linear attention with gates, chunk by chunk or as one triangle (GLA, arXiv:2312.06635; simple GLA).

Before: `G = cumsum(g); L = exp(G_t - G_s); o = (q k^T * L) v` within chunks, states of chunks carried by decays of
        their own, `o + (q exp(G)) S`, with a gate a head or a channel, in any spelling
After:  `o, final_state, states = megacpp.gated_linear_attention(q, k, v, g, initial_state, None, scale, ...)`

Safe because the matcher (`matchers/ssd/linear.py`) runs the subgraph at small sizes on random operands and compares it
with the recurrence that the op computes; the op computes in float32 or better.
Refused: parts under different grad or autocast modes, and on CPU a few chunks (`few-chunks`), unless the pass is asked
for by name: of 16 chunks of 64 tokens, 8 heads of 64 channels, Inductor's code takes half of the op's time, forward and
backward, of 4 a third (one thread); of more, it takes longer and longer to compile. What is no such attention is told
by `ssd_scan`, which knows the same decays; a scan, which has its step in them, is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx import short_loops
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.ssd.atoms import flat
from megacpp_compile.matchers.ssd.linear import LinearAttention, find_linear_attention
from megacpp_compile.matchers.ssd.scan import Scan, find_scans
from megacpp_compile.passes._rewrites.arrange import arrange, gated_chunk_size, leading, results
from megacpp_compile.passes._rule import Match, in_other_modes

name = "gated_linear_attention"
# Chunks up to which the plain code is quicker on a CPU, and compiles in a while.
CHUNKS_ON_CPU = 16
FEW_CHUNKS = ("few-chunks", f"up to {CHUNKS_ON_CPU} chunks on a CPU: Inductor's code of the plain form is quicker")
op = "megacpp::gated_linear_attention"
after: tuple[str, ...] = ("gated_delta_rule",)  # a delta rule is no near miss of this pass


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    found = list(find_linear_attention(view.graph))
    scanned = set[Node]()
    if found:  # a scan is one, too, whose values have its step in them
        scanned = scanned.union(*(scan.inside for scan in find_scans(view.graph) if isinstance(scan, Scan)))
    for attention in found:
        if not attention.inside & scanned:
            yield _check(view, attention)


@or_failure
def _check(view: GraphView, found: LinearAttention) -> Match | MatchFailure:
    root = found.o.node
    or_refuse(in_other_modes(view, sorted(found.inside), root))
    on_cpu = value(root).device.type == "cpu" and not view.config.passes.get(name)
    refuse_if(on_cpu and 1 < _chunks(view, found) <= CHUNKS_ON_CPU, root, *FEW_CHUNKS)
    operands = (found.q, found.k, found.v, found.g, found.initial_state)
    inputs = list(dict.fromkeys(leaf.node for leaf in operands if leaf is not None))
    outputs = [leaf.node for leaf in (found.o, *found.final_states)]

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        b, t, h, k, v = (found.dims[name] for name in "bthkv")
        groups = leading([found.q, found.k], h)
        by_channel = {a for d in found.g.dims for a in d} & set(k)
        node = build(
            torch.ops.megacpp.gated_linear_attention.default,
            arrange(build, found.q, (b, t, groups, k)),
            arrange(build, found.k, (b, t, groups, k)),
            arrange(build, found.v, (b, t, h, v)),
            arrange(build, found.g, (b, t, h, k) if by_channel else (b, t, h)),
            found.initial_state and arrange(build, found.initial_state, (b, h, k, v)),
            None, found.scale, gated_chunk_size(found.chunk), value(root).dtype,
        )  # fmt: skip
        return node, results(build, node, found.o, (b, t, h, v), found.final_states, (b, h, k, v))

    return Match(root, inputs, outputs, rewrite)


def _chunks(view: GraphView, found: LinearAttention) -> int:
    """How many chunks it is written in; where a few steps of a loop over them are in the graph, of the whole loop."""
    if looped := short_loops.marks(view.graph):
        return max(int(mark.args[3]) for mark in looped)  # type: ignore[arg-type]
    sizes: list[int] = [hint(atom.size) for atom in flat(found.dims["t"])]  # type: ignore[arg-type]
    tokens = math.prod(sizes)
    return -(-tokens // found.chunk) if found.chunk else 1
