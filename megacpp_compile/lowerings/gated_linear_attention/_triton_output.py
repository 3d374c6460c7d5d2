"""Triton kernel: what queries read, segments side by side, with the state in registers from chunk to chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.gated_delta_rule._triton_backward_tiles import (
    add_product,
    chunk_tokens,
    end_of,
    operand,
    product,
)
from megacpp_compile.lowerings.gated_linear_attention._triton_walk import begun, place


@triton.jit
def between(total, r):
    """[t, i]: the decay from token i to t, for gates summed up to and with each; 0 where i comes behind t."""
    return tl.exp2(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf")))


@triton.jit
def pairs(queries, keys, total, length, heads, small_decay, dots, scores,
          C: tl.constexpr, GATED: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """P [C, C]: queries by keys times the decay between the two, 0 above the diagonal. CHANNELS: gates are in the rows
    of a chunk of small decay, where dots, a row apart by `heads`, are the diagonal, less rounded; of others P is in
    scores."""
    r = tl.arange(0, C)
    made = product(queries, tl.trans(operand(keys, WIDE)), WIDE)
    if GATED:
        made *= between(total, r)
    if CHANNELS:
        is_small_decay = tl.load(small_decay)
        same = tl.load(dots + r * heads, mask=r < length * is_small_decay, other=0)[:, None]
        square = r[:, None] * C + r[None, :]
        by_cuts = tl.load(scores + square, mask=square * 0 + is_small_decay == 0, other=0)
        made = tl.where(r[:, None] == r[None, :], same, made)
        made = tl.where(is_small_decay != 0, made, by_cuts.to(tl.float32))
    # A product of factors may be infinite above the diagonal, which a weight of 0 does not undo.
    return tl.where(r[:, None] >= r[None, :], made, 0)


@triton.jit
def gla_output(q, k, v, decay, ends, small_decay, dots, scores, table, starts, stops, outside, entering, o, last,
               tokens, chunks, behind_last, heads, per_key, scale, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
               C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, EVERY: tl.constexpr,
               GATED: tl.constexpr, CHANNELS: tl.constexpr, OUTSIDE: tl.constexpr, PACKED: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """o [b, t, h, V] = scale (exp(G) q S + P v), BV of V channels, and last [n, h, K, V], what sequences end with.

    entering [b, s, h, K, V]: the states that enter segments. CHANNELS: gates are in q and k (`_triton_small_decay`)."""
    scale = single(scale)
    segment, h, count = place(chunks, behind_last, EVERY)
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, n, p = tl.arange(0, C), tl.arange(0, K), tile * BV + tl.arange(0, BV)[None, :]
    q += b * q_b + h // per_key * q_h
    k += b * k_b + h // per_key * k_h
    v += b * v_b + h * v_h
    at = n[:, None] * V + p
    segments = (chunks + EVERY - 1) // EVERY
    state = tl.load(entering + ((b * segments + segment) * heads + h) * K * V + at)
    total = tl.zeros([C], tl.float32)
    for i in range(count):
        c = segment * EVERY + i
        row = (b * chunks + c) * heads + h
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r[:, None] < length
        if PACKED:
            document = tl.load(starts + c)
            if document >= 0:
                state = begun(state, document, outside, heads, h, at, K, V, OUTSIDE)
        queries = tl.load(q + first * q_t + (r[:, None] * q_t + n[None, :]), mask=there, other=0)
        keys = tl.load(k + first * k_t + (r[:, None] * k_t + n[None, :]), mask=there, other=0)
        values = tl.load(v + first * v_t + (r[:, None] * v_t + p), mask=there, other=0)
        if GATED:
            total = tl.load(decay + row * C + r)
        weights = pairs(
            queries, keys, total, length, heads, small_decay + row, dots + (b * tokens + first) * heads + h,
            scores + row * C * C, C, GATED, CHANNELS, WIDE,
        )  # fmt: skip
        if CHANNELS:
            state *= tl.exp2(end_of(ends, row, 1, 1, K))[:, None]
        rows = product(queries, state, WIDE)
        if GATED:
            rows *= tl.exp2(total)[:, None]
        rows = add_product(rows, weights, values, WIDE) * scale
        out = o + ((b * tokens + first) * heads + h) * V + (r[:, None] * (heads * V) + p)
        tl.store(out, as_stored(rows, o), mask=there)
        if CHANNELS:
            state *= tl.exp2(end_of(ends, row, 0, 1, K))[:, None]
        elif GATED:
            end = tl.load(decay + row * C + C - 1)
            values = values.to(tl.float32) * tl.exp2(end - total)[:, None]
            state *= tl.exp2(end)
        state = add_product(state, tl.trans(operand(keys, WIDE)), values, WIDE)
        if CHANNELS:
            state *= tl.exp2(end_of(ends, row, 2, 1, K))[:, None]
        if PACKED:
            document = tl.load(stops + c)
            if document >= 0:
                tl.store(last + (document * heads + h) * K * V + at, state)
    if not PACKED:
        if segment == segments - 1:
            tl.store(last + (b * heads + h) * K * V + at, state)


output = Kernel(
    gla_output,
    [{"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (2, 3)],
    key=("heads", "C", "K", "V", "BV"),
)
