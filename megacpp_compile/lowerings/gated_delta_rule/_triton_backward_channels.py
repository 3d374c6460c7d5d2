"""Triton kernels of backward for gates a channel: what no state enters, and the gradients of q, k and the gates.

The decay between two tokens is inside the sum over channels, and neither of two factors of it may grow. So pairs of
tokens are told apart by halves: a chunk is cut in two, then each half, down to single rows, and a pair belongs to the
cut that parts it. With G_m at the cut, the first row behind it, both factors are exp(-|G - G_m|) <= 1, and one GEMM of
the chunk serves all cuts of one size. Chunks that decay little are not these kernels'
(`_triton_large_decay`, `_triton_small_decay_gradients`).
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
    chunk_tokens,
    from_behind,
    normed,
    operand,
    product,
    through_norm,
)
from megacpp_compile.lowerings.gated_delta_rule._triton_large_decay import nth_chunk, share
from megacpp_compile.lowerings.gated_delta_rule._triton_states import NO_STEP


@triton.jit
def _cut(decay, log, C: tl.constexpr, K: tl.constexpr):
    """2^-|G - its row behind the cut|, the cut in the middle of each 2^(log + 1) rows, for G [C, K] in memory; and
    whether a cut parts two rows, the first of them behind it."""
    r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
    behind = ((r >> (log + 1)) << (log + 1)) + (1 << log)
    own = tl.load(decay + (r[:, None] * K + n))
    factor = tl.exp2(0 - tl.abs(own - tl.load(decay + (behind[:, None] * K + n))))
    return factor, (((r[:, None] ^ r[None, :]) >> log) == 1) & (r[:, None] > r[None, :])


@triton.jit
def _add_decayed_keys(to, gate, readers, readers_t, pairs, k, k_t, length, eps, decay, C: tl.constexpr, K: tl.constexpr,
                      CUTS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """`to` and, for each row t, the keys of the rows i before it times pairs[t, i] and the decay from i to t; `gate`
    and that times `readers`, rows of q or k: what makes the gradient of G."""
    for log in range(CUTS):
        factor, parted = _cut(decay, log, C, K)
        keys, _ = normed(k, k_t, length, eps, C, K, NORM)
        read = product(tl.where(parted, pairs, 0), keys * factor, WIDE)
        to += read * factor
        rows, _ = normed(readers, readers_t, length, eps, C, K, NORM)
        gate += as_multiplied(rows * factor, WIDE) * read
    return to, gate


@triton.jit
def gated_delta_rule_prepare_channels(q, k, g, beta, inverse, table, decay, steps, ends, queries,
                                      keys, out_keys, solve, scores_t, large_decay, tokens, chunks, heads, per_key,
                                      scale, eps, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
                                      C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                                      CUTS: tl.constexpr, SKIP: tl.constexpr, BETA: tl.constexpr,
                                      NORM: tl.constexpr, PACKED: tl.constexpr,
                                      WIDE: tl.constexpr):  # fmt: skip
    """As `gated_delta_rule_prepare`, with decay [b, c, h, C, K] a channel. Queries and keys that read the state, and
    keys that write it, have theirs inside, and norms, in queries, keys and out_keys [b, t, h, K]. ends [b, c, h, 3, K]:
    the chunk's sum, and twice 0 (`_triton_small_decay`). CUTS: log2(C). SKIP: leaves out chunks of small decay."""
    scale, eps = single(scale), single(eps)
    start, stop, stride = share(large_decay, SKIP)
    for i in tl.range(start, stop, stride, disable_licm=True):
        c, h, b = nth_chunk(large_decay, i, chunks, heads, SKIP)
        r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r < length
        row = (b * chunks + c) * heads + h
        k_rows = k + b * k_b + h // per_key * k_h + first * k_t
        q_rows = q + b * q_b + h // per_key * q_h + first * q_t
        g_rows = g + b * g_b + h * g_h + first * g_t
        gates = tl.load(g_rows + (r[:, None] * g_t + n), mask=there[:, None], other=0).to(tl.float32) * LOG2_E
        key, _ = normed(k_rows, k_t, length, eps, C, K, NORM)
        query, _ = normed(q_rows, q_t, length, eps, C, K, NORM)
        total = tl.cumsum(gates, 0)
        whole = tl.sum(gates, 0)
        sums = decay + row * C * K
        tl.store(sums + (r[:, None] * K + n), total)
        end = ends + row * 3 * K + tl.arange(0, K)
        tl.store(end, whole)
        tl.store(end + K, tl.zeros([K], tl.float32))
        tl.store(end + 2 * K, tl.zeros([K], tl.float32))
        step = tl.full([C], 1, tl.float32)
        if BETA:
            step = tl.load(beta + b * beta_b + h * beta_h + first * beta_t + r * beta_t, mask=there, other=0)
            step = step.to(tl.float32)
        tl.store(steps + row * C + r, step)
        out = ((b * tokens + first) * heads + h) * K
        at = r[:, None] * (heads * K) + n
        tl.store(queries + out + at, as_stored(query * tl.exp2(total), queries), mask=there[:, None])
        tl.store(keys + out + at, as_stored(key * tl.exp2(total), keys), mask=there[:, None])
        tl.store(out_keys + out + at, as_stored(key * tl.exp2(whole[None, :] - total), out_keys), mask=there[:, None])
        tl.debug_barrier()  # rows of the decay are read by other threads than wrote them
        scores = tl.where(r[:, None] == r[None, :], tl.sum(query * key, 1)[:, None], 0.0)
        for log in range(CUTS):
            factor, parted = _cut(sums, log, C, K)
            scores += tl.where(parted, product(query * factor, tl.trans(key * factor), WIDE), 0)
        tl.store(scores_t + row * C * C + (r[:, None] * C + r[None, :]), as_stored(tl.trans(scores * scale), scores_t))
        inverse_rows = inverse + ((b * tokens + first) * heads + h) * C + (r[:, None] * (heads * C) + r[None, :])
        solved = tl.load(inverse_rows, mask=there[:, None], other=0).to(tl.float32)
        if BETA:
            smallest = tl.min(tl.where(there, tl.abs(step), 1), 0)
            if smallest < NO_STEP:
                between = tl.zeros([C, C], tl.float32)
                for log in range(CUTS):
                    factor, parted = _cut(sums, log, C, K)
                    between += tl.where(parted, product(key * factor, tl.trans(key * factor), WIDE), 0)
                solved = 0 - product(between, solved * step[None, :], WIDE)
            else:
                solved = solved * (step[None, :] / tl.where(there, step, 1)[:, None])
        solved = tl.where(r[:, None] == r[None, :], 1, solved)
        tl.store(solve + row * C * C + (r[:, None] * C + r[None, :]), as_stored(solved, solve))


@triton.jit
def gated_delta_rule_query_grad_channels(q, k, do, table, decay, steps, states, errors, dq, d_scores, d_decay,
                                         large_decay, tokens, chunks, heads, per_key, scale, eps,
                                         q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h,
                                         C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                         CUTS: tl.constexpr, SKIP: tl.constexpr,
                                         NORM: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """What a value head gives to dq [b, t, h, K]; the gradient of P, d_scores [b, c, h, C, C], before decays; and the
    queries' part of that of the decays, d_decay [b, c, h, C, K]."""
    scale, eps = single(scale), single(eps)
    start, stop, stride = share(large_decay, SKIP)
    for i in tl.range(start, stop, stride, disable_licm=True):
        c, h, b = nth_chunk(large_decay, i, chunks, heads, SKIP)
        r, n, m = tl.arange(0, C), tl.arange(0, K)[None, :], tl.arange(0, K)[:, None]
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r[:, None] < length
        row = (b * chunks + c) * heads + h
        q_rows = q + b * q_b + h // per_key * q_h + first * q_t
        k_rows = k + b * k_b + h // per_key * k_h + first * k_t
        do_rows = do + b * do_b + h * do_h + first * do_t
        out = ((b * tokens + first) * heads + h) * K
        sums = decay + row * C * K
        scores = tl.zeros([C, C], tl.float32)
        d = tl.zeros([C, K], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            grad = operand(tl.load(do_rows + (r[:, None] * do_t + v), mask=there, other=0), WIDE)
            error = operand(tl.load(errors + row * C * V + (r[:, None] * V + v)), WIDE)
            state = operand(tl.load(states + row * K * V + (m * V + v)), WIDE)
            scores = add_product(scores, grad, tl.trans(error), WIDE)
            d = add_product(d, grad, tl.trans(state), WIDE)
        scores *= (tl.load(steps + row * C + r) * scale)[None, :]
        tl.store(d_scores + row * C * C + (r[:, None] * C + r[None, :]), as_stored(scores, d_scores))
        d *= scale
        from_start = tl.exp2(tl.load(sums + (r[:, None] * K + n)))
        queries, _ = normed(q_rows, q_t, length, eps, C, K, NORM)
        gate = as_multiplied(queries * from_start, WIDE) * d
        d, gate = _add_decayed_keys(
            d * from_start, gate, q_rows, q_t, scores, k_rows, k_t, length, eps, sums, C, K, CUTS, NORM, WIDE
        )
        tl.store(d_decay + row * C * K + (r[:, None] * K + n), gate)
        queries, of_q = normed(q_rows, q_t, length, eps, C, K, NORM)
        keys, _ = normed(k_rows, k_t, length, eps, C, K, NORM)
        d += tl.sum(tl.where(r[:, None] == r[None, :], scores, 0), 1)[:, None] * keys
        d = through_norm(d, queries, of_q, NORM)
        tl.store(dq + out + (r[:, None] * (heads * K) + n), as_stored(d, dq), mask=there)


@triton.jit
def gated_delta_rule_read_grad_channels(k, table, decay, states, d_between, d_decay, d_reads, dv,
                                        large_decay, tokens, chunks, heads, per_key, eps, k_b, k_t, k_h,
                                        C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                        CUTS: tl.constexpr, SKIP: tl.constexpr,
                                        NORM: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The gradient of keys where they read the state or stand in A's rows, d_reads [b, c, h, C, K]; what it gives to
    that of the decays is added to `d_decay`. d_between [b, c, h, C, C]: the gradient of A, before decays."""
    eps = single(eps)
    start, stop, stride = share(large_decay, SKIP)
    for i in tl.range(start, stop, stride, disable_licm=True):
        c, h, b = nth_chunk(large_decay, i, chunks, heads, SKIP)
        r, n, m = tl.arange(0, C), tl.arange(0, K)[None, :], tl.arange(0, K)[:, None]
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        row = (b * chunks + c) * heads + h
        k_rows = k + b * k_b + h // per_key * k_h + first * k_t
        dv_rows = dv + ((b * tokens + first) * heads + h) * V
        sums = decay + row * C * K
        d = tl.zeros([C, K], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            d_value = tl.load(dv_rows + (r[:, None] * (heads * V) + v), mask=r[:, None] < length, other=0)
            state = tl.load(states + row * K * V + (m * V + v))
            d = add_product(d, d_value, tl.trans(operand(state, WIDE)), WIDE)
        from_start = tl.exp2(tl.load(sums + (r[:, None] * K + n)))
        at = row * C * K + (r[:, None] * K + n)
        keys, _ = normed(k_rows, k_t, length, eps, C, K, NORM)
        gate = tl.load(d_decay + at) - as_multiplied(keys * from_start, WIDE) * d
        between = tl.load(d_between + row * C * C + (r[:, None] * C + r[None, :]))
        d, gate = _add_decayed_keys(
            0 - d * from_start, gate, k_rows, k_t, between, k_rows, k_t, length, eps, sums, C, K, CUTS, NORM, WIDE
        )
        tl.store(d_reads + at, d)
        tl.store(d_decay + at, gate)


@triton.jit
def gated_delta_rule_key_grad_channels(q, k, table, decay, steps, ends, states, errors, d_states, d_scores, d_between,
                                       d_decay, d_reads, dk, dg, large_decay, tokens, chunks, heads, per_key, eps,
                                       q_b, q_t, q_h, k_b, k_t, k_h,
                                       C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                       CUTS: tl.constexpr, SKIP: tl.constexpr,
                                       NORM: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """What a value head gives to dk [b, t, h, K], from d_reads and from keys where they write the state or stand in
    columns of A and P; and dg."""
    eps = single(eps)
    start, stop, stride = share(large_decay, SKIP)
    for i in tl.range(start, stop, stride, disable_licm=True):
        c, h, b = nth_chunk(large_decay, i, chunks, heads, SKIP)
        r, n, m = tl.arange(0, C), tl.arange(0, K)[None, :], tl.arange(0, K)[:, None]
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r[:, None] < length
        row = (b * chunks + c) * heads + h
        q_rows = q + b * q_b + h // per_key * q_h + first * q_t
        k_rows = k + b * k_b + h // per_key * k_h + first * k_t
        out = ((b * tokens + first) * heads + h) * K
        sums = decay + row * C * K
        d = tl.zeros([C, K], tl.float32)
        inner = tl.zeros([K], tl.float32)
        for j in range(V // BV):
            v = j * BV + tl.arange(0, BV)[None, :]
            error = tl.load(errors + row * C * V + (r[:, None] * V + v))
            d_state = operand(tl.load(d_states + row * K * V + (m * V + v)), WIDE)
            d = add_product(d, error, tl.trans(d_state), WIDE)
            inner += tl.sum(tl.load(states + row * K * V + (m * V + v)).to(tl.float32) * d_state.to(tl.float32), 1)
        whole = tl.load(sums + (C - 1) * K + tl.arange(0, K))
        left = tl.exp2(whole[None, :] - tl.load(sums + (r[:, None] * K + n)))
        d *= tl.load(steps + row * C + r)[:, None]
        keys, _ = normed(k_rows, k_t, length, eps, C, K, NORM)
        written = as_multiplied(keys * left, WIDE) * d
        at_end = tl.sum(written, 0) + inner * tl.exp2(tl.load(ends + row * 3 * K + tl.arange(0, K)))
        at = row * C * K + (r[:, None] * K + n)
        gate = tl.load(d_decay + at) - written
        d *= left
        pairs = row * C * C + (r[:, None] * C + r[None, :])
        for log in range(CUTS):
            factor, parted = _cut(sums, log, C, K)
            queries, _ = normed(q_rows, q_t, length, eps, C, K, NORM)
            own = product(tl.trans(tl.load(d_scores + pairs, mask=parted, other=0)), queries * factor, WIDE)
            keys, _ = normed(k_rows, k_t, length, eps, C, K, NORM)
            own = add_product(own, tl.trans(tl.load(d_between + pairs, mask=parted, other=0)), keys * factor, WIDE)
            d += own * factor
            gate -= as_multiplied(keys * factor, WIDE) * own
        keys, of_k = normed(k_rows, k_t, length, eps, C, K, NORM)
        gate = from_behind(gate) + at_end[None, :]
        tl.store(dg + out + (r[:, None] * (heads * K) + n), as_stored(gate, dg), mask=there)
        diagonal = tl.load(d_scores + row * C * C + r * (C + 1)).to(tl.float32)
        queries, _ = normed(q_rows, q_t, length, eps, C, K, NORM)
        d = through_norm(d + tl.load(d_reads + at) + diagonal[:, None] * queries, keys, of_k, NORM)
        tl.store(dk + out + (r[:, None] * (heads * K) + n), as_stored(d, dk), mask=there)


CHOICES = [{"num_warps": warps, "num_stages": 1} for warps in (4, 8)]
prepare = Kernel(gated_delta_rule_prepare_channels, CHOICES, key=("heads", "C", "K", "V"))
query_grad = Kernel(gated_delta_rule_query_grad_channels, CHOICES, key=("heads", "C", "K", "V", "BV"))
read_grad = Kernel(
    gated_delta_rule_read_grad_channels, CHOICES, key=("heads", "C", "K", "V", "BV"), restore=("d_decay",)
)
key_grad = Kernel(gated_delta_rule_key_grad_channels, CHOICES, key=("heads", "C", "K", "V", "BV"))
