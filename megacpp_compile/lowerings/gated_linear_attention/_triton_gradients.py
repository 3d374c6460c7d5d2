"""Triton kernels: the gradients of linear attention, chunks side by side, from the states that enter them and the
gradients of those that leave them.

CHANNELS (HB = 1): gates are in q and k; dq and dk are of those, float32 [b, c, h, C, K], without what P's diagonal
gives, and of chunks of large decay without what P gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.gated_delta_rule._triton_backward_tiles import (
    add_product,
    chunk_and_head,
    chunk_tokens,
    operand,
    product,
)
from megacpp_compile.lowerings.gated_linear_attention._triton_output import between, pairs


@triton.jit
def gla_query_gradients(q, k, v, do, decay, small_decay, dots, scores, table, states, dq, reads, d_scores,
                        tokens, chunks, heads, key_heads, scale, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
                        do_b, do_t, do_h,
                        C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HB: tl.constexpr,
                        GATED: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
                        WIDE: tl.constexpr):  # fmt: skip
    """dq [b, t, hk, K], summed over the HB value heads of a key head, and d_scores [b, c, h, C, C], the gradient of the
    product of q and k, CHANNELS of P.

    GATED, reads [b, c, h, C]: what a token gives to the logarithm of decays by reading the state, and by pairs. A pair
    gives nothing to gates that are not between the two tokens: what is added in the reader's row and taken away in the
    writer's are rows and columns of one product.
    """
    scale = single(scale)
    c, key_head = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    r, n, m = tl.arange(0, C), tl.arange(0, K)[None, :], tl.arange(0, K)[:, None]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r[:, None] < length
    q += b * q_b + key_head * q_h + first * q_t
    k += b * k_b + key_head * k_h + first * k_t
    grads = tl.zeros([C, K], tl.float32)
    for i in tl.range(0, HB, disable_licm=True):
        h = key_head * HB + i
        row = (b * chunks + c) * heads + h
        d, into = tl.zeros([C, C], tl.float32), tl.zeros([C, K], tl.float32)
        for j in range(V // BV):
            p = j * BV + tl.arange(0, BV)[None, :]
            values = tl.load(v + b * v_b + h * v_h + first * v_t + (r[:, None] * v_t + p), mask=there, other=0)
            grad = tl.load(do + b * do_b + h * do_h + first * do_t + (r[:, None] * do_t + p), mask=there, other=0)
            state = tl.load(states + row * K * V + (m * V + p))
            d = add_product(d, grad, tl.trans(operand(values, WIDE)), WIDE)
            into = add_product(into, grad, tl.trans(state), WIDE)
        d = tl.where(r[:, None] >= r[None, :], d * scale, 0)
        into *= scale
        if GATED:
            total = tl.load(decay + row * C + r)
            into *= tl.exp2(total)[:, None]
            queries = tl.load(q + (r[:, None] * q_t + n), mask=there, other=0)
            gate = tl.sum(queries.to(tl.float32) * into, 1)
            grads += into
            keys = tl.load(k + (r[:, None] * k_t + n), mask=there, other=0)
            weights = pairs(queries, keys, total, length, heads, small_decay, dots, scores, C, GATED, CHANNELS, WIDE)
            moved = tl.where(r[:, None] > r[None, :], d * weights, 0)
            tl.store(reads + row * C + r, gate + tl.sum(moved, 1) - tl.sum(moved, 0))
            d *= between(total, r)
        else:
            grads += into
            keys = tl.load(k + (r[:, None] * k_t + n), mask=there, other=0)
        tl.store(d_scores + row * C * C + (r[:, None] * C + r[None, :]), as_stored(d, d_scores))
        if CHANNELS:
            d = tl.where((r[:, None] > r[None, :]) & (tl.load(small_decay + row) != 0), d, 0)
        grads = add_product(grads, d, keys, WIDE)
    if CHANNELS:
        tl.store(dq + ((b * chunks + c) * heads + key_head) * C * K + (r[:, None] * K + n), grads)
    else:
        at = ((b * tokens + first) * key_heads + key_head) * K + (r[:, None] * (key_heads * K) + n)
        tl.store(dq + at, as_stored(grads, dq), mask=there)


@triton.jit
def gla_key_gradients(q, k, v, do, decay, small_decay, dots, scores, table, states, d_states, reads, d_scores, dk, dv,
                      dg,
                      d_end,
                      tokens, chunks, heads, key_heads, scale, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
                      do_b, do_t, do_h,
                      C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HB: tl.constexpr,
                      GATED: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
                      WIDE: tl.constexpr):  # fmt: skip
    """dk [b, t, hk, K], summed over the HB value heads of a key head, dv [b, t, h, V], and, GATED, dg [b, t, h].
    CHANNELS, d_end [b, c, h, K]: the gradient of the logarithm of the chunk's whole decay, in chunks of small decay
    with what keys write."""
    scale = single(scale)
    c, key_head = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    r, n, m = tl.arange(0, C), tl.arange(0, K)[None, :], tl.arange(0, K)[:, None]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r[:, None] < length
    q += b * q_b + key_head * q_h + first * q_t
    k += b * k_b + key_head * k_h + first * k_t
    grads, total = tl.zeros([C, K], tl.float32), tl.zeros([C], tl.float32)
    for i in tl.range(0, HB, disable_licm=True):
        h = key_head * HB + i
        row = (b * chunks + c) * heads + h
        queries = tl.load(q + (r[:, None] * q_t + n), mask=there, other=0)
        keys = tl.load(k + (r[:, None] * k_t + n), mask=there, other=0)
        if GATED:
            total, end = tl.load(decay + row * C + r), tl.load(decay + row * C + C - 1)
            left = tl.exp2(end - total)[:, None]
        weights = pairs(
            queries, keys, total, length, heads, small_decay + row, dots + (b * tokens + first) * heads + h,
            scores + row * C * C, C, GATED, CHANNELS, WIDE,
        )  # fmt: skip
        transposed = tl.trans(operand(weights * scale, WIDE))
        out = tl.zeros([C, K], tl.float32)
        inner = tl.zeros([K], tl.float32)
        for j in range(V // BV):
            p = j * BV + tl.arange(0, BV)[None, :]
            values = tl.load(v + b * v_b + h * v_h + first * v_t + (r[:, None] * v_t + p), mask=there, other=0)
            grad = tl.load(do + b * do_b + h * do_h + first * do_t + (r[:, None] * do_t + p), mask=there, other=0)
            d_state = tl.load(d_states + row * K * V + (m * V + p))
            if GATED or CHANNELS:
                state = tl.load(states + row * K * V + (m * V + p))
                inner += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
            out = add_product(out, values, tl.trans(d_state), WIDE)
            written = product(keys, d_state, WIDE)
            if GATED:
                written *= left
            written = add_product(written, transposed, grad, WIDE)
            at = ((b * tokens + first) * heads + h) * V + (r[:, None] * (heads * V) + p)
            tl.store(dv + at, as_stored(written, dv), mask=there)
        if GATED:
            out *= left
            gate = tl.load(reads + row * C + r)
            leaving = tl.sum(keys.to(tl.float32) * out, 1)
            gate = tl.sum(gate, 0) - tl.cumsum(gate, 0) + gate + tl.cumsum(leaving, 0) - leaving
            gate += tl.sum(inner, 0) * tl.exp2(end)
            at = (b * tokens + first) * heads + h + r * heads
            tl.store(dg + at, as_stored(gate, dg), mask=r < length)
        d = tl.load(d_scores + row * C * C + (r[:, None] * C + r[None, :]))
        if CHANNELS:
            is_small_decay = tl.load(small_decay + row) != 0
            inner += tl.where(is_small_decay, tl.sum(keys.to(tl.float32) * out, 0), 0)
            tl.store(d_end + row * K + tl.arange(0, K), inner)
            d = tl.where((r[:, None] > r[None, :]) & is_small_decay, d, 0)
        grads = add_product(grads + out, tl.trans(operand(d, WIDE)), queries, WIDE)
    if CHANNELS:
        tl.store(dk + ((b * chunks + c) * heads + key_head) * C * K + (r[:, None] * K + n), grads)
    else:
        at = ((b * tokens + first) * key_heads + key_head) * K + (r[:, None] * (key_heads * K) + n)
        tl.store(dk + at, as_stored(grads, dk), mask=there)


CHOICES = [{"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (1, 2)]
query_gradients = Kernel(gla_query_gradients, CHOICES, key=("heads", "C", "K", "V", "BV", "HB"))
key_gradients = Kernel(gla_key_gradients, CHOICES, key=("heads", "C", "K", "V", "BV", "HB"))
