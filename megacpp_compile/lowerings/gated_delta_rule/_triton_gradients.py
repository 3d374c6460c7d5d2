"""Triton kernels: gradients of q, k, v, the gates and beta, chunks side by side, one decay a head.

Where two value heads read a key head, one program takes them in turn: no atomics, and equal inputs give equal bits.
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
    through_norm,
)

# Parts of the decays' gradient that kernels pass on, per token: from P, from A, from the queries' reading of the state.
PARTS = 3


@triton.jit
def gated_delta_rule_query_grad(q, k, do, table, decay, steps, norms, states, errors, dq, d_scores, d_decay,
                                tokens, chunks, heads, key_heads, scale,
                                q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h,
                                C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                HB: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
                                WIDE: tl.constexpr):  # fmt: skip
    """dq, summed over the HB value heads of a key head; the gradient of the scores q k^T, summed likewise and times
    q's norm, for dk; and two parts of the decays' gradient."""
    scale = single(scale)
    c, group = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r[:, None] < length
    q += b * q_b + group * q_h + first * q_t
    k += b * k_b + group * k_h + first * k_t
    at = r[:, None] * C + r[None, :]
    d_scores += ((b * chunks + c) * key_heads + group) * C * C
    norms += ((b * chunks + c) * heads + group * HB) * 2 * C
    of_q, of_k = tl.load(norms + r), tl.load(norms + C + r)
    do += b * do_b + first * do_t
    dq += ((b * tokens + first) * key_heads + group) * K
    keys = operand(tl.load(k + (r[:, None] * k_t + n), mask=there, other=0), WIDE)
    scores = product(tl.load(q + (r[:, None] * q_t + n), mask=there, other=0), tl.trans(keys), WIDE)
    # Nothing decays from a token to itself.
    scores = tl.where(r[:, None] > r[None, :], scores * of_q[:, None] * of_k[None, :], 0)
    summed = tl.zeros([C, C], tl.float32)
    for i in range(HB):
        h = group * HB + i
        row = (b * chunks + c) * heads + h
        total, step = tl.load(decay + row * C + r), tl.load(steps + row * C + r)
        d = tl.zeros([C, C], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            grad = tl.load(do + h * do_h + (r[:, None] * do_t + v), mask=there, other=0)
            error = tl.load(errors + row * C * V + (r[:, None] * V + v))
            d = add_product(d, grad, tl.trans(operand(error, WIDE)), WIDE)
        apart = total[:, None] - total[None, :]
        d *= tl.exp2(tl.where(r[:, None] >= r[None, :], apart, float("-inf"))) * (step * scale)[None, :]
        summed += d
        d *= scores
        tl.store(d_decay + row * 3 * C + r, tl.sum(d, 1) - tl.sum(d, 0))
    tl.store(d_scores + at, as_stored(summed * of_q[:, None], d_scores))
    out = product(summed * of_k[None, :], keys, WIDE)
    for i in range(HB):
        h = group * HB + i
        row = (b * chunks + c) * heads + h
        total = tl.load(decay + row * C + r)
        d = tl.zeros([C, K], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            grad = tl.load(do + h * do_h + (r[:, None] * do_t + v), mask=there, other=0)
            state = tl.load(states + row * K * V + (tl.arange(0, K)[:, None] * V + v))
            d = add_product(d, grad, tl.trans(operand(state, WIDE)), WIDE)
        d *= (tl.exp2(total) * scale)[:, None]
        rows = tl.load(q + (r[:, None] * q_t + n), mask=there, other=0)
        tl.store(d_decay + (row * 3 + 1) * C + r, tl.sum(d * rows.to(tl.float32), 1) * of_q)
        out += d
    rows = tl.load(q + (r[:, None] * q_t + n), mask=there, other=0).to(tl.float32) * of_q[:, None]
    out = through_norm(out, rows, of_q, NORM)
    tl.store(dq + (r[:, None] * (key_heads * K) + n), as_stored(out, dq), mask=there)


@triton.jit
def gated_delta_rule_value_grad(k, table, decay, steps, norms, errors, d_rows, d_between, d_decay, dv, dbeta,
                                tokens, chunks, heads, key_heads, k_b, k_t, k_h,
                                C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                HB: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
                                WIDE: tl.constexpr):  # fmt: skip
    """dv = beta dR and dbeta = <dR, F>; the gradient of k k^T, summed over the HB value heads of a key head, with
    that of its transpose and times k's norm; and a part of the decays' gradient."""
    c, group = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r[:, None] < length
    k += b * k_b + group * k_h + first * k_t
    dv += (b * tokens + first) * heads * V
    dbeta += (b * tokens + first) * heads
    of_k = tl.load(norms + (((b * chunks + c) * heads + group * HB) * 2 + 1) * C + r)
    keys = operand(tl.load(k + (r[:, None] * k_t + n), mask=there, other=0), WIDE)
    between = product(keys, tl.trans(keys), WIDE) * of_k[:, None] * of_k[None, :]
    summed = tl.zeros([C, C], tl.float32)
    for i in range(HB):
        h = group * HB + i
        row = (b * chunks + c) * heads + h
        total, step = tl.load(decay + row * C + r), tl.load(steps + row * C + r)
        d = tl.zeros([C, C], tl.float32)
        d_step = tl.zeros([C], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            d_row = tl.load(d_rows + row * C * V + (r[:, None] * V + v))
            error = tl.load(errors + row * C * V + (r[:, None] * V + v))
            d = add_product(d, d_row, tl.trans(operand(error, WIDE)), WIDE)
            d_row = d_row.to(tl.float32)
            d_step += tl.sum(d_row * error.to(tl.float32), 1)
            tl.store(dv + h * V + (r[:, None] * (heads * V) + v), as_stored(d_row * step[:, None], dv), mask=there)
        if BETA:
            tl.store(dbeta + h + r * heads, as_stored(d_step, dbeta), mask=r < length)
        apart = total[:, None] - total[None, :]
        d *= tl.exp2(tl.where(r[:, None] > r[None, :], apart, float("-inf")))
        d *= (0 - step)[:, None] * step[None, :]
        summed += d
        d *= between
        tl.store(d_decay + (row * 3 + 2) * C + r, tl.sum(d, 1) - tl.sum(d, 0))
    d_between += ((b * chunks + c) * key_heads + group) * C * C
    summed = (summed + tl.trans(summed)) * of_k[None, :]
    tl.store(d_between + (r[:, None] * C + r[None, :]), as_stored(summed, d_between))


@triton.jit
def gated_delta_rule_key_grad(q, k, table, decay, steps, norms, states, errors, d_states, d_scores, d_between,
                              d_decay, dv, dk, dg, tokens, chunks, heads, key_heads, q_b, q_t, q_h, k_b, k_t, k_h,
                              C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                              HB: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
                              WIDE: tl.constexpr):  # fmt: skip
    """dk, summed over the HB value heads of a key head, and dg, the sum from behind of all that the decays are due."""
    c, group = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r[:, None] < length
    q += b * q_b + group * q_h + first * q_t
    k += b * k_b + group * k_h + first * k_t
    at = ((b * chunks + c) * key_heads + group) * C * C
    dk += ((b * tokens + first) * key_heads + group) * K
    dv += (b * tokens + first) * heads * V
    dg += (b * tokens + first) * heads
    of_k = tl.load(norms + (((b * chunks + c) * heads + group * HB) * 2 + 1) * C + r)
    scores = tl.load(d_scores + at + (r[:, None] * C + r[None, :]))
    out = product(tl.trans(scores), tl.load(q + (r[:, None] * q_t + n), mask=there, other=0), WIDE)
    between = tl.load(d_between + at + (r[:, None] * C + r[None, :]))
    out = add_product(out, between, tl.load(k + (r[:, None] * k_t + n), mask=there, other=0), WIDE)
    for i in range(HB):
        h = group * HB + i
        row = (b * chunks + c) * heads + h
        total, step = tl.load(decay + row * C + r), tl.load(steps + row * C + r)
        whole = tl.load(decay + row * C + C - 1)
        d = tl.zeros([C, K], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            d_value = tl.load(dv + h * V + (r[:, None] * (heads * V) + v), mask=there, other=0)
            state = tl.load(states + row * K * V + (tl.arange(0, K)[:, None] * V + v))
            d = add_product(d, d_value, tl.trans(operand(state, WIDE)), WIDE)
        d *= (0 - tl.exp2(total))[:, None]
        rows = tl.load(k + (r[:, None] * k_t + n), mask=there, other=0)
        d_total = tl.sum(d * rows.to(tl.float32), 1) * of_k
        out += d
        d = tl.zeros([C, K], tl.float32)
        inner = tl.zeros([K], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            error = tl.load(errors + row * C * V + (r[:, None] * V + v))
            d_state = tl.load(d_states + row * K * V + (tl.arange(0, K)[:, None] * V + v))
            d = add_product(d, error, tl.trans(operand(d_state, WIDE)), WIDE)
            if GATED:
                state = tl.load(states + row * K * V + (tl.arange(0, K)[:, None] * V + v))
                inner += tl.sum(d_state.to(tl.float32) * state.to(tl.float32), 1)
        d *= (tl.exp2(whole - total) * step)[:, None]
        out += d
        if GATED:
            rows = tl.load(k + (r[:, None] * k_t + n), mask=there, other=0)
            from_end = tl.sum(d * rows.to(tl.float32), 1) * of_k
            parts = d_decay + row * 3 * C + r
            d_total += tl.load(parts) + tl.load(parts + C) + tl.load(parts + 2 * C) - from_end
            at_end = tl.sum(inner, 0) * tl.exp2(whole) + tl.sum(from_end, 0)
            d_gate = tl.sum(d_total, 0) - tl.cumsum(d_total, 0) + d_total + at_end
            tl.store(dg + h + r * heads, as_stored(d_gate, dg), mask=r < length)
    rows = tl.load(k + (r[:, None] * k_t + n), mask=there, other=0).to(tl.float32) * of_k[:, None]
    out = through_norm(out, rows, of_k, NORM)
    tl.store(dk + (r[:, None] * (key_heads * K) + n), as_stored(out, dk), mask=there)


CHOICES = [{"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 1), (4, 2), (8, 1))]
query_grad = Kernel(gated_delta_rule_query_grad, CHOICES, key=("heads", "C", "K", "V", "BV", "HB"))
value_grad = Kernel(gated_delta_rule_value_grad, CHOICES, key=("heads", "C", "K", "V", "BV", "HB"))
key_grad = Kernel(gated_delta_rule_key_grad, CHOICES, key=("heads", "C", "K", "V", "BV", "HB"))
