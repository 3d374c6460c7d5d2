"""Triton kernels of backward for chunks of small decay of gates a channel (`_triton_small_decay`): gradients of q, k
and the gates.

As factors, gates are in queries, keys and out_keys before any GEMM, and in no GEMM's operands afterwards: two kernels
multiply, for the gradients of those three, and one that only reads and writes takes the factors out of them again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._triton_backward_tiles import (
    add_product,
    as_multiplied,
    chunk_and_head,
    chunk_tokens,
    operand,
)
from megacpp_compile.lowerings.gated_delta_rule._triton_small_decay import row_norm


@triton.jit
def gated_delta_rule_value_grad(table, steps, errors, d_rows, d_between, dv, dbeta, tokens, chunks, heads,
                                C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                BETA: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Of all chunks: dv = beta dR, dbeta = <dR, F>, and the gradient of A [b, c, h, C, C] before decays and norms."""
    c, h = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, C)
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    row = (b * chunks + c) * heads + h
    dv += ((b * tokens + first) * heads + h) * V
    step = tl.load(steps + row * C + r)
    d = tl.zeros([C, C], tl.float32)
    d_step = tl.zeros([C], tl.float32)
    for j in range(V // BV):
        v = j * BV + tl.arange(0, BV)[None, :]
        d_row = tl.load(d_rows + row * C * V + (r[:, None] * V + v))
        error = tl.load(errors + row * C * V + (r[:, None] * V + v))
        d = add_product(d, d_row, tl.trans(operand(error, WIDE)), WIDE)
        d_step += tl.sum(d_row.to(tl.float32) * error.to(tl.float32), 1)
        d_value = d_row.to(tl.float32) * step[:, None]
        tl.store(dv + (r[:, None] * (heads * V) + v), as_stored(d_value, dv), mask=r[:, None] < length)
    if BETA:
        tl.store(dbeta + (b * tokens + first) * heads + h + r * heads, as_stored(d_step, dbeta), mask=r < length)
    d *= (0 - step)[:, None] * step[None, :]
    tl.store(d_between + row * C * C + (r[:, None] * C + r[None, :]), as_stored(d, d_between))


@triton.jit
def gated_delta_rule_query_grad_small_decay(out_keys, do, table, steps, states, errors, small_decay, d_scores,
                                            d_queries,
                                     tokens, chunks, heads, scale, do_b, do_t, do_h,
                                     C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                     PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """d_scores [b, c, h, C, C], the gradient of P, and d_queries [b, c, h, C, K], less what the diagonal of P gives."""
    scale = single(scale)
    c, h = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    row = (b * chunks + c) * heads + h
    if tl.load(small_decay + row) == 0:
        return
    r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r[:, None] < length
    out_keys += ((b * tokens + first) * heads + h) * K
    do += b * do_b + h * do_h + first * do_t
    scores = tl.zeros([C, C], tl.float32)
    d = tl.zeros([C, K], tl.float32)
    for j in range(V // BV):
        v = j * BV + tl.arange(0, BV)
        grad = tl.load(do + (r[:, None] * do_t + v[None, :]), mask=there, other=0)
        error = tl.load(errors + row * C * V + (r[None, :] * V + v[:, None]))
        state = tl.load(states + row * K * V + (n * V + v[:, None]))
        scores = add_product(scores, grad, error, WIDE)
        d = add_product(d, grad, state, WIDE)
    scores *= (tl.load(steps + row * C + r) * scale)[None, :]
    tl.store(d_scores + row * C * C + (r[:, None] * C + r[None, :]), as_stored(scores, d_scores))
    keys = tl.load(out_keys + (r[:, None] * (heads * K) + n), mask=there, other=0)
    d = add_product(d * scale, tl.where(r[:, None] > r[None, :], scores, 0), keys, WIDE)
    tl.store(d_queries + row * C * K + (r[:, None] * K + n), d)


@triton.jit
def gated_delta_rule_key_grad_small_decay(queries, keys, out_keys, table, steps, states, errors, d_states, d_scores,
                                          d_between,
                                   dv, small_decay, d_keys, d_out_keys, d_end, tokens, chunks, heads,
                                   C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                   PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """d_keys and d_out_keys [b, c, h, C, K], less what the diagonal of P gives, and d_end [b, c, h, K], the gradient of
    the chunk's whole decay. d_between [b, c, h, C, C]: the gradient of A."""
    c, h = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    row = (b * chunks + c) * heads + h
    if tl.load(small_decay + row) == 0:
        return
    r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r[:, None] < length
    rows = ((b * tokens + first) * heads + h) * K + (r[:, None] * (heads * K) + n)
    dv += ((b * tokens + first) * heads + h) * V
    d = tl.zeros([C, K], tl.float32)
    for j in range(V // BV):
        v = j * BV + tl.arange(0, BV)
        d_value = tl.load(dv + (r[:, None] * (heads * V) + v[None, :]), mask=there, other=0)
        state = tl.load(states + row * K * V + (n * V + v[:, None]))
        d = add_product(d, d_value, state, WIDE)
    pairs = row * C * C + (r[:, None] * C + r[None, :])
    between = tl.load(d_between + pairs, mask=r[:, None] > r[None, :], other=0)
    d = add_product(0 - d, between, tl.load(out_keys + rows, mask=there, other=0), WIDE)
    tl.store(d_keys + row * C * K + (r[:, None] * K + n), d)
    d = tl.zeros([C, K], tl.float32)
    inner = tl.zeros([K], tl.float32)
    for j in range(V // BV):
        v = j * BV + tl.arange(0, BV)
        error = tl.load(errors + row * C * V + (r[:, None] * V + v[None, :]))
        state = tl.load(states + row * K * V + (n * V + v[:, None]))
        d_state = tl.load(d_states + row * K * V + (n * V + v[:, None]))
        d = add_product(d, error, d_state, WIDE)
        inner += tl.sum(d_state.to(tl.float32) * state.to(tl.float32), 0)
    d *= tl.load(steps + row * C + r)[:, None]
    written = tl.load(out_keys + rows, mask=there, other=0).to(tl.float32)
    tl.store(d_end + row * K + tl.arange(0, K), inner + tl.sum(written * d, 0))
    scores = tl.load(d_scores + pairs, mask=r[:, None] > r[None, :], other=0)
    d = add_product(d, tl.trans(scores), tl.load(queries + rows, mask=there, other=0), WIDE)
    between = tl.load(d_between + pairs, mask=r[:, None] > r[None, :], other=0)
    d = add_product(d, tl.trans(between), tl.load(keys + rows, mask=there, other=0), WIDE)
    tl.store(d_out_keys + row * C * K + (r[:, None] * K + n), d)


@triton.jit
def _through_norm(grad, unit, norm, NORM: tl.constexpr):
    """As `through_norm`, of one row."""
    if NORM:
        return (grad - unit * tl.sum(unit * grad, 0)) * norm
    else:
        return grad


@triton.jit
def gated_delta_rule_grads_small_decay(q, k, g, table, small_decay, ends, d_scores, d_queries, d_keys, d_out_keys,
                                       d_end, dq, dk, dg,
                                tokens, chunks, heads, per_key, eps, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
                                C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
                                READS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """What a value head gives to dq and dk [b, t, h, K], and dg: a warp walks back over the rows, ROWS unrolled, with G
    and the sum of the gates' gradient in registers. READS: keys read the state as well, as the delta rule's do."""
    eps = single(eps)
    c, h = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    row = (b * chunks + c) * heads + h
    if tl.load(small_decay + row) == 0:
        return
    n = tl.arange(0, K)
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    q += b * q_b + h // per_key * q_h + first * q_t + n
    k += b * k_b + h // per_key * k_h + first * k_t + n
    g += b * g_b + h * g_h + first * g_t + n
    out = ((b * tokens + first) * heads + h) * K + n
    within = row * C * K + n
    d_scores += row * C * C
    length = tl.zeros([K], tl.int32) + length
    apart, gate = tl.load(ends + row * 3 * K + 2 * K + n), tl.load(d_end + row * K + n)
    for block in range(C // ROWS):
        for i in tl.static_range(ROWS):
            r = C - 1 - block * ROWS - i
            there = r < length
            reader, at = tl.exp2(apart), out + r.to(tl.int64) * heads * K
            diagonal = tl.load(d_scores + r * (C + 1)).to(tl.float32)
            query = tl.load(q + r * q_t, mask=there, other=0).to(tl.float32)
            key = tl.load(k + r * k_t, mask=there, other=0).to(tl.float32)
            of_q, of_k = row_norm(query, eps, NORM), row_norm(key, eps, NORM)
            query, key = query * of_q, key * of_k
            d = tl.load(d_queries + within + r * K)
            gate += as_multiplied(query * reader, False) * d
            d *= reader
            tl.store(dq + at, as_stored(_through_norm(d + diagonal * key, query, of_q, NORM), dq), mask=there)
            writer = tl.exp2(0 - apart)
            written = tl.load(d_out_keys + within + r * K)
            gate -= as_multiplied(key * writer, False) * written
            written = written * writer + diagonal * query
            if READS:
                d = tl.load(d_keys + within + r * K)
                gate += as_multiplied(key * reader, False) * d
                written += d * reader
            d = _through_norm(written, key, of_k, NORM)
            tl.store(dk + at, as_stored(d, dk), mask=there)
            tl.store(dg + at, as_stored(gate, dg), mask=there)
            apart -= tl.load(g + r * g_t, mask=there, other=0).to(tl.float32) * LOG2_E


CHOICES = [{"num_warps": warps, "num_stages": 1} for warps in (4, 8)]
value_grad = Kernel(gated_delta_rule_value_grad, CHOICES, key=("heads", "C", "K", "V", "BV"))
query_grad = Kernel(gated_delta_rule_query_grad_small_decay, CHOICES, key=("heads", "C", "K", "V", "BV"))
key_grad = Kernel(gated_delta_rule_key_grad_small_decay, CHOICES, key=("heads", "C", "K", "V", "BV"))
grads = Kernel(
    gated_delta_rule_grads_small_decay,
    [{"num_warps": 1, "num_stages": 1, "ROWS": n} for n in (2, 4)],
    key=("heads", "C", "K"),
)
