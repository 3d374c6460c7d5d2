"""Triton kernel: the walk from the last chunk to the first that carries the gradient of the state along."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.gated_delta_rule._triton_backward_tiles import (
    add_product,
    chunk_tokens,
    operand,
    product,
    read_factor,
    whole_decay,
    write_factor,
)


@triton.jit
def gated_delta_rule_reverse_walk(q, k, do, w, du_local, decay, steps, norms, ends, table, documents, last,
                                  d_states, du, d_initial, tokens, chunks, heads, per_key, scale,
                                  q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h,
                                  C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                                  CHANNELS: tl.constexpr, LAST: tl.constexpr, PACKED: tl.constexpr,
                                  WIDE: tl.constexpr):  # fmt: skip
    """Gradients of the states that leave the chunks [b, c, h, K, V] and of U, du [b, c, h, C, V], and of the first
    state: BV of V channels, in registers from chunk to chunk.

    With gates a channel the states that gradients are of are those times what `k^T U` is multiplied by.
    Two GEMMs wait for the state's gradient, that of U and what w takes from it; the one of the queries does not.
    """
    scale = single(scale)
    tile, h, document = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r, n, p = tl.arange(0, C), tl.arange(0, K), tile * BV + tl.arange(0, BV)[None, :]
    if PACKED:
        b = document * 0
        begin, count = tl.load(documents + 2 * document), tl.load(documents + 2 * document + 1)
    else:
        b = document
        begin, count = tile * 0, chunks
    q += b * q_b + h // per_key * q_h
    k += b * k_b + h // per_key * k_h
    do += b * do_b + h * do_h
    at = n[:, None] * V + p
    state = tl.zeros([K, BV], tl.float32)
    if LAST:
        state += tl.load(last + (document * heads + h) * K * V + at).to(tl.float32)
    for i in range(count):
        c = begin + count - 1 - i
        row = (b * chunks + c) * heads + h
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r[:, None] < length
        total, step = tl.load(decay + row * C + r), tl.load(steps + row * C + r)
        whole = tl.load(decay + row * C + C - 1)
        of_q, of_k = tl.load(norms + 2 * row * C + r), tl.load(norms + (2 * row + 1) * C + r)
        queries = tl.load(q + first * q_t + (r[:, None] * q_t + n[None, :]), mask=there, other=0)
        keys = tl.load(k + first * k_t + (r[:, None] * k_t + n[None, :]), mask=there, other=0)
        grad = tl.load(do + first * do_t + (r[:, None] * do_t + p), mask=there, other=0)
        local = tl.load(du_local + row * C * V + r[:, None] * V + p)
        reads = tl.load(w + row * C * K + r[:, None] * K + n[None, :])
        if CHANNELS:
            leaving = operand(state * write_factor(ends, row, K), WIDE)
        else:
            leaving = operand(state, WIDE)
        tl.store(d_states + row * K * V + at, as_stored(leaving, d_states))
        d = product(keys, leaving, WIDE) * (of_k * tl.exp2(whole - total))[:, None] + local.to(tl.float32)
        tl.store(du + row * C * V + r[:, None] * V + p, as_stored(d, du))
        weighted = grad.to(tl.float32) * (of_q * tl.exp2(total) * scale)[:, None]
        state *= whole_decay(ends, row, whole, K, CHANNELS)
        if CHANNELS:
            entering = product(tl.trans(operand(queries, WIDE)), weighted, WIDE)
            entering = add_product(entering, tl.trans(operand(reads, WIDE)), d * (0 - step)[:, None], WIDE)
            state += entering * read_factor(ends, row, K, CHANNELS)
        else:
            state = add_product(state, tl.trans(operand(queries, WIDE)), weighted, WIDE)
            state = add_product(state, tl.trans(operand(reads, WIDE)), d * (0 - step)[:, None], WIDE)
    tl.store(d_initial + (document * heads + h) * K * V + at, state)


reverse_walk = Kernel(
    gated_delta_rule_reverse_walk,
    [{"num_warps": 4, "num_stages": stages} for stages in (2, 3)],
    key=("heads", "C", "K", "V", "BV"),
)
