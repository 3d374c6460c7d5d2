"""A loop over tokens of a delta rule, linear attention or Mamba's scan, as reference code has it, unrolled by Dynamo.

Before: `for i in range(t): S = S * g[:, i].exp(); S = S + k[:, i] (beta[:, i] (v[:, i] - S^T k[:, i]))^T; o[:, i] =
        S^T q[:, i]`, in any spelling, results stacked, concatenated or written into a tensor, chunk by chunk or not
After:  `o, final_state, ... = megacpp.gated_delta_rule(q, k, v, g, beta, S, ...)`; without the correction
        `megacpp.gated_linear_attention(q, k, v, g, S, ...)`, or where no token changes the decay of a head (RetNet,
        lightning attention) `megacpp.ssd_scan` with a step of one, which has a kernel. Where one step size is in decays
        and in what is written, `megacpp.ssd_scan` with it, or `megacpp.selective_scan` where decays differ by channel
        and state (Mamba-1). Products of all tokens may be made in front of the loop, and
        what a step makes of what it reads of the state (a norm, a gate, a skip) stays, of each token, as does what
        is handed on beside the state (a normaliser, a running maximum)

Safe because one step is run small beside the recurrence, and the others are the same graph at the next position
(`matchers/token_loops/`); what is made in front of the loop is made token by token. The op's own dtype is float32 at
least.
Refused: steps that differ, states or other intermediates that are read elsewhere, decays that are no exponential or
sigmoid, as their logarithm may not exist. A single step is no loop (`gated_delta_rule` names it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers._match import MatchFailure, or_failure, or_refuse, refuse_if
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.ssd.roles import Leaf
from megacpp_compile.matchers.token_loops.proof import TokenLoop, find_token_loops
from megacpp_compile.passes._rewrites.arrange import arrange, gated_chunk_size
from megacpp_compile.passes._rewrites.token_operands import Operands
from megacpp_compile.passes._rule import Match, decided, in_other_modes
from megacpp_compile.passes.ssd_scan import chunk_size

name = "token_loop"
op = "megacpp::gated_delta_rule"
after: tuple[str, ...] = ()
# Tokens from one saved state of a selective scan to the next.
SELECTIVE_CHUNK = 256

OTHER_GRAD = ("region", "its tokens are taken out of a tensor under another grad mode")


def find(view: GraphView) -> Iterator[Match | MatchFailure]:
    yield from decided(find_token_loops(view.graph), partial(_check, view))


@or_failure
def _check(view: GraphView, found: TokenLoop) -> Match | MatchFailure:
    loop = found.loop
    root, last = loop.outputs.node, loop.states[-1]
    taken = loop.taken()
    or_refuse(in_other_modes(view, sorted((loop.inside | found.inside) - taken), root))
    refuse_if(any(view.mode_states[n].grad != view.mode_states[root].grad for n in taken), root, *OTHER_GRAD)
    operands = Operands(found)
    if (problem := operands.problem()) is not None:
        return MatchFailure(root, *problem)
    ends = [last] if any(u not in loop.inside and u is not root for u in last.users) else []
    outputs = [root] if loop.read is None else loop.everywhere(loop.read)
    inputs = list(dict.fromkeys(operands.read()))

    def rewrite(build: Builder) -> tuple[Node, list[Node]]:
        emit = _emitter(operands)
        node, o, state = emit(build, operands, value(outputs[-1]).dtype)
        new = [arrange(build, o, operands.output())]
        if loop.read is not None:
            several = build(aten.unbind.int, new[0], 0)
            new = [build.cast(build.item(several, i), value(each).dtype) for i, each in enumerate(outputs)]
        new += [build.cast(arrange(build, state, found.initial.dims), value(last).dtype)] * len(ends)
        return node, new

    return Match(root, inputs, [*outputs, *ends], rewrite)


def _emitter(operands: Operands) -> Callable[[Builder, Operands, torch.dtype], tuple[Node, Leaf, Leaf]]:
    found = operands.found
    if found.scan:
        return _selective if found.rates else _steps
    return _scan if not found.delta and operands.one_rate() else _gated


def _gated(build: Builder, operands: Operands, dtype: torch.dtype) -> tuple[Node, Leaf, Leaf]:
    """The op with a gate of each token, or of none: with the correction or without."""
    f, megacpp = operands.found, torch.ops.megacpp
    b, t, h, k, v = operands.b, operands.t, operands.h, operands.k, operands.v
    groups, chunk = operands.groups(), gated_chunk_size(f.loop.tokens)
    queries, keys = (operands.arranged(build, role, (b, t, groups, k)) for role in ("q", "k"))
    values = _values(build, operands)
    gates = operands.spread(build, "g", (b, t, h, k) if operands.by_channel() else (b, t, h), values)
    state = operands.initial(build, (b, h, k, v))
    read = queries, keys, values, gates
    if f.delta:
        beta = operands.spread(build, "beta", (b, t, h), values)
        node = build(megacpp.gated_delta_rule.default, *read, beta, state, None, f.scale, None, chunk, dtype)
    else:
        node = build(megacpp.gated_linear_attention.default, *read, state, None, f.scale, chunk, dtype)
    return node, Leaf(build.item(node, 0), (b, t, h, v)), Leaf(build.item(node, 1), (b, h, k, v))


def _values(build: Builder, operands: Operands) -> Node:
    """Values, without the correction by their weights: a product that is no less exact than the op."""
    b, t, h, v = operands.b, operands.t, operands.h, operands.v
    values = operands.arranged(build, "v", (b, t, h, v))
    if operands.found.delta or "beta" not in operands.found.operands:
        return values
    beta = operands.arranged(build, "beta", (b, t, h, ()))
    wide = torch.promote_types(torch.promote_types(value(values).dtype, value(beta).dtype), torch.float32)
    return build(aten.mul.Tensor, build.cast(values, wide), build.cast(beta, wide))


def _steps(build: Builder, operands: Operands, dtype: torch.dtype) -> tuple[Node, Leaf, Leaf]:
    """With a step size of each token."""
    b, t, h, n, p = operands.b, operands.t, operands.h, operands.k, operands.v
    groups = operands.groups()
    node = build(
        torch.ops.megacpp.ssd_scan.default, operands.arranged(build, "x", (b, t, h, p)),
        operands.arranged(build, "dt", (b, t, h)), operands.arranged(build, "A", (h,)),
        operands.arranged(build, "B", (b, t, groups, n)), operands.arranged(build, "C", (b, t, groups, n)),
        operands.arranged(build, "D", (h,)) if "D" in operands.found.operands else None,
        operands.initial(build, (b, h, p, n)), chunk_size(operands.found.loop.tokens), dtype,
    )  # fmt: skip
    return node, Leaf(build.item(node, 0), (b, t, h, p)), Leaf(build.item(node, 1), (b, h, p, n))


def _selective(build: Builder, operands: Operands, dtype: torch.dtype) -> tuple[Node, Leaf, Leaf]:
    """With a rate of each channel and state."""
    b, t, d, n = operands.b, operands.t, operands.h, operands.k
    node = build(
        torch.ops.megacpp.selective_scan.default, operands.arranged(build, "x", (b, t, d)),
        operands.arranged(build, "dt", (b, t, d)), operands.arranged(build, "A", (d, n)),
        operands.arranged(build, "B", (b, t, n)), operands.arranged(build, "C", (b, t, n)),
        operands.arranged(build, "D", (d,)) if "D" in operands.found.operands else None,
        operands.initial(build, (b, d, n)), SELECTIVE_CHUNK, dtype,
    )  # fmt: skip
    return node, Leaf(build.item(node, 0), (b, t, d)), Leaf(build.item(node, 1), (b, d, n))


def _scan(build: Builder, operands: Operands, dtype: torch.dtype) -> tuple[Node, Leaf, Leaf]:
    """With one rate for each head, or none, and a step of one."""
    f = operands.found
    b, t, h, k, v = operands.b, operands.t, operands.h, operands.k, operands.v
    groups = operands.groups()
    values = _values(build, operands)
    steps = build(aten.ones_like.default, build(aten.select.int, values, 3, 0), dtype=torch.float32)
    none = build(aten.sum.dim_IntList, build(aten.zeros_like.default, steps), [0, 1])
    wide = torch.promote_types(value(values).dtype, torch.float32)
    constant = none if f.rate == 1 else build(aten.add.Tensor, build.cast(none, wide), math.log(f.rate))
    rate = operands.arranged(build, "g", (h,)) if "g" in f.operands else constant
    queries = operands.arranged(build, "q", (b, t, groups, k))
    node = build(
        torch.ops.megacpp.ssd_scan.default, values, steps, rate,
        operands.arranged(build, "k", (b, t, groups, k)),
        queries if f.scale == 1 else build(aten.mul.Tensor, queries, f.scale),
        None, operands.initial(build, (b, h, v, k)), chunk_size(f.loop.tokens), dtype,
    )  # fmt: skip
    return node, Leaf(build.item(node, 0), (b, t, h, v)), Leaf(build.item(node, 1), (b, h, v, k))
