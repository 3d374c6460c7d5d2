"""Triton kernel: the walk from the last chunk to the first that carries the gradient of the state along."""

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


@triton.jit
def gated_delta_rule_reverse_walk(q, k, out_keys, do, inverse, scores_t, decay, steps, norms, ends, table, documents,
                                  last, d_states, d_rows, d_initial, tokens, chunks, behind_last, heads, per_key, scale,
                                  q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h,
                                  C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                  CHANNELS: tl.constexpr, LAST: tl.constexpr, PACKED: tl.constexpr,
                                  WIDE: tl.constexpr):  # fmt: skip
    """Gradients of the states that leave the chunks [b, c, h, K, V], of R, d_rows [b, c, h, C, V], where U = T R, and
    of the first state: BV of V channels, in registers from chunk to chunk.

    What U is given by P, here transposed, is made here: it waits for nothing, and in memory it would be larger than P.
    Three GEMMs wait for the state's gradient: that of U, that of R, and what R takes from it; the one of the queries
    does not. `CHANNELS`: gates are in q, k and out_keys, and d_states are gradients of what k^T U is added to
    (`_triton_small_decay`).
    """
    scale = single(scale)
    tile, h, document = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r, n, p = tl.arange(0, C), tl.arange(0, K), tile * BV + tl.arange(0, BV)[None, :]
    if PACKED:
        b = document * 0
        begin, count = tl.load(documents + 2 * document), tl.load(documents + 2 * document + 1)
    else:
        b = document
        begin, count = tile * 0, behind_last - 1
    q += b * q_b + h // per_key * q_h
    k += b * k_b + h // per_key * k_h
    out_keys += b * k_b + h // per_key * k_h
    inverse += (b * tokens * heads + h) * C
    do += b * do_b + h * do_h
    at = n[:, None] * V + p
    state = tl.zeros([K, BV], tl.float32)
    if LAST:
        state += tl.load(last + (document * heads + h) * K * V + at).to(tl.float32)
    if CHANNELS:  # a chunk ahead, which the compiler does for what GEMMs multiply, not for what they add to
        coming = end_of(ends, (b * chunks + begin + count - 1) * heads + h, 0, count, K)
    for i in range(count):
        c = begin + count - 1 - i
        row = (b * chunks + c) * heads + h
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r[:, None] < length
        step = tl.load(steps + row * C + r)
        if not CHANNELS:
            total, whole = tl.load(decay + row * C + r), tl.load(decay + row * C + C - 1)
            of_q, of_k = tl.load(norms + 2 * row * C + r), tl.load(norms + (2 * row + 1) * C + r)
        queries = tl.load(q + first * q_t + (r[:, None] * q_t + n[None, :]), mask=there, other=0)
        keys = tl.load(k + first * k_t + (r[:, None] * k_t + n[None, :]), mask=there, other=0)
        grad = tl.load(do + first * do_t + (r[:, None] * do_t + p), mask=there, other=0)
        solved = tl.load(inverse + first * heads * C + (r[:, None] * (heads * C) + r[None, :]), mask=there, other=0)
        scores = tl.load(scores_t + row * C * C + r[:, None] * C + r[None, :])
        if CHANNELS:
            writing = tl.load(out_keys + first * k_t + (r[:, None] * k_t + n[None, :]), mask=there, other=0)
            # The gradient of S is what was summed, times the read factor of the chunk behind.
            state *= tl.exp2(end_of(ends, row, 2, 1, K) + end_of(ends, row + heads, 1, i, K))[:, None]
        leaving = operand(state, WIDE)
        tl.store(d_states + row * K * V + at, as_stored(leaving, d_states))
        local = product(scores, grad, WIDE)
        if CHANNELS:
            d = add_product(local, writing, leaving, WIDE)
        else:
            d = product(keys, leaving, WIDE) * (of_k * tl.exp2(whole - total))[:, None]
            # Subtracted: added, it would be summed up on d, behind the GEMM that waits for the state.
            d -= 0 - local
        d = product(tl.trans(operand(solved, WIDE)), d, WIDE)
        tl.store(d_rows + row * C * V + r[:, None] * V + p, as_stored(d, d_rows))
        if CHANNELS:
            weighted = grad.to(tl.float32) * scale
            taken = step
            state *= tl.exp2(coming)[:, None]
            coming = end_of(ends, row - heads, 0, count - 1 - i, K)
        else:
            weighted = grad.to(tl.float32) * (of_q * tl.exp2(total) * scale)[:, None]
            taken = step * of_k * tl.exp2(total)
            state *= tl.exp2(whole)
        state = add_product(state, tl.trans(operand(queries, WIDE)), weighted, WIDE)
        state = add_product(state, tl.trans(operand(keys, WIDE)), d * (0 - taken)[:, None], WIDE)
    if CHANNELS:
        state *= tl.exp2(end_of(ends, (b * chunks + begin) * heads + h, 1, count, K))[:, None]
    tl.store(d_initial + (document * heads + h) * K * V + at, state)


reverse_walk = Kernel(
    gated_delta_rule_reverse_walk,
    [{"num_warps": 4, "num_stages": stages} for stages in (2, 3)],
    key=("heads", "C", "K", "V", "BV"),
)
