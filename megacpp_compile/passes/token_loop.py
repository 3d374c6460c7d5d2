"""A loop over tokens of a delta rule or a linear attention, as naive and reference code has it, unrolled by Dynamo.

Before: `for i in range(t): S = S * g[:, i].exp(); S = S + k[:, i] (beta[:, i] (v[:, i] - S^T k[:, i]))^T; o[:, i] =
        S^T q[:, i]`, in any spelling, results stacked, concatenated or written into a tensor
After:  `o, final_state, ... = megacpp.gated_delta_rule(q, k, v, g, beta, S, ...)`; without the correction
        `megacpp.gated_linear_attention(q, k, v, g, S, ...)`, or where no token changes the decay of a head (RetNet,
        lightning attention) `megacpp.ssd_scan` with a step of one, which has a kernel

Safe because one step is run small beside the recurrence, and the others are the same graph at the next position
(`matchers/token_loops/`); the op computes in float32 or better.
Refused: steps that differ, states or other intermediates that are read elsewhere, decays that are no exponential or
sigmoid, as their logarithm may not exist. A single step is no loop (`gated_delta_rule` names it).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, place, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.ssd.roles import Leaf
from megacpp_compile.matchers.token_loops.proof import TokenLoop, find_token_loops
from megacpp_compile.passes._arrange import arrange, gated_chunk_size
from megacpp_compile.passes._rule import REGION, Match, in_other_modes
from megacpp_compile.passes._token_operands import Operands
from megacpp_compile.passes.ssd_scan import chunk_size

aten = torch.ops.aten
name = "token_loop"
op = "megacpp::gated_delta_rule"
after: tuple[str, ...] = ()
# (tag, reason) of a linear attention with gates of its tokens: `gated_linear_attention` has no kernel.
NO_KERNEL = ("cuda", "linear attention with gates of its tokens has no kernel on CUDA: it stays as it is written")


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    for loop in find_token_loops(view.graph):
        yield _check(view, loop) if isinstance(loop, TokenLoop) else MatchFailure(loop.node, loop.tag, loop.reason)


def _check(view: GraphView, found: TokenLoop) -> Match | MatchFailure:
    loop = found.loop
    root, last = loop.outputs.node, loop.states[-1]
    if (refusal := in_other_modes(view, sorted(loop.inside), root)) is not None:
        return refusal
    operands = Operands(found)
    if (problem := operands.problem()) is not None:
        return MatchFailure(root, *problem)
    if value(root).device.type == "cuda" and not found.delta and not operands.one_rate():
        return MatchFailure(root, *NO_KERNEL)
    ends = [last] if any(u not in loop.inside and u is not root for u in last.users) else []
    inputs = list(dict.fromkeys(operands.read()))
    if place(inputs, [root, *ends], root, view.mode_states) is None:
        return MatchFailure(root, *REGION)

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        emit = _scan if not found.delta and operands.one_rate() else _gated
        node, o, state = emit(build, operands, value(root).dtype)
        new = [arrange(build, o, operands.output())]
        new += [build.cast(arrange(build, state, found.initial.dims), value(last).dtype)] * len(ends)
        return node, new

    return Match(root, inputs, [root, *ends], rewrite)


def _gated(build: Builder, operands: Operands, dtype: torch.dtype) -> tuple[Node, Leaf, Leaf]:
    """The op with a gate of each token, or of none: with the correction or without."""
    f, megacpp = operands.found, torch.ops.megacpp
    b, t, h, k, v = operands.b, operands.t, operands.h, operands.k, operands.v
    groups, chunk = operands.groups(), gated_chunk_size(f.loop.count)
    queries, keys = (operands.arranged(build, role, (b, t, groups, k)) for role in ("q", "k"))
    values = operands.arranged(build, "v", (b, t, h, v))
    gates = operands.spread(build, "g", (b, t, h, k) if operands.by_channel() else (b, t, h), values)
    beta, state = operands.spread(build, "beta", (b, t, h), values), operands.initial(build, (b, h, k, v))
    read = queries, keys, values, gates
    if f.delta:
        node = build(megacpp.gated_delta_rule.default, *read, beta, state, None, f.scale, None, chunk, dtype)
    else:
        node = build(megacpp.gated_linear_attention.default, *read, state, None, f.scale, chunk, dtype)
    return node, Leaf(build.item(node, 0), (b, t, h, v)), Leaf(build.item(node, 1), (b, h, k, v))


def _scan(build: Builder, operands: Operands, dtype: torch.dtype) -> tuple[Node, Leaf, Leaf]:
    """With one rate for each head, or none, and a step of one."""
    f = operands.found
    b, t, h, k, v = operands.b, operands.t, operands.h, operands.k, operands.v
    groups = operands.groups()
    values = operands.arranged(build, "v", (b, t, h, v))
    steps = build(aten.ones_like.default, build(aten.select.int, values, 3, 0), dtype=torch.float32)
    none = build(aten.sum.dim_IntList, build(aten.zeros_like.default, steps), [0, 1])
    rate = operands.arranged(build, "g", (h,)) if "g" in f.operands else none
    queries = operands.arranged(build, "q", (b, t, groups, k))
    node = build(
        torch.ops.megacpp.ssd_scan.default, values, steps, rate,
        operands.arranged(build, "k", (b, t, groups, k)),
        queries if f.scale == 1 else build(aten.mul.Tensor, queries, f.scale),
        None, operands.initial(build, (b, h, v, k)), chunk_size(f.loop.count), dtype,
    )  # fmt: skip
    return node, Leaf(build.item(node, 0), (b, t, h, v)), Leaf(build.item(node, 1), (b, h, v, k))
