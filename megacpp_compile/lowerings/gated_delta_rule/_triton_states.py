"""Triton kernels: what backward makes anew of forward, chunks side by side and then segments side by side.

With A_ti = <k_t, k_i> times the decay from i to t, i < t, and E = V - Kh S0 (the tokens' values less what the entering
state predicts), forward's U is diag(beta) F with F = E - A U, so F = (I + A diag(beta))^-1 E. Backward keeps F, not U:
beta's gradient is <dR, F>, without dividing by it. The matrix follows from forward's T = (I + diag(beta) A)^-1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._triton_backward_tiles import (
    add_product,
    chunk_and_head,
    chunk_tokens,
    end_of,
    inverse_norm,
    operand,
    product,
)

# Below it, T's rows do not say any more what they are over beta.
NO_STEP = tl.constexpr(1e-18)


@triton.jit
def gated_delta_rule_prepare(q, k, out_keys, dots, g, beta, inverse, table, decay, steps, norms, solve, scores_t,
                             small_decay, tokens, chunks, heads, per_key, scale, eps,
                             q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
                             C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                             GATED: tl.constexpr, SMALL_DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
                             PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """What a chunk of a value head needs that no state enters.

    decay, steps [b, c, h, C]: g summed up to and with a token, in powers of 2, and beta; behind the last token nothing
    decays and nothing comes in. norms [b, c, h, 2, C]: what normalises a row of q and of k.
    solve [b, c, h, C, C] = (I + A diag(beta))^-1; scores_t [b, c, h, C, C] = P^T.
    SMALL_DECAY: of chunks of small decay alone, whose gates and norms are in q, k and out_keys (`_triton_small_decay`);
    decay and norms are not written.
    """
    scale, eps = single(scale), single(eps)
    c, h = chunk_and_head(chunks)
    b = tl.program_id(1).to(tl.int64)
    r, n = tl.arange(0, C), tl.arange(0, K)[None, :]
    first, length = chunk_tokens(table, c, tokens, C, PACKED)
    there = r < length
    q += b * q_b + h // per_key * q_h + first * q_t
    k += b * k_b + h // per_key * k_h + first * k_t
    row = (b * chunks + c) * heads + h
    if SMALL_DECAY:
        if tl.load(small_decay + row) == 0:
            return
    keys = operand(tl.load(k + (r[:, None] * k_t + n), mask=there[:, None], other=0), WIDE)
    if SMALL_DECAY:
        columns = out_keys + b * k_b + h // per_key * k_h + first * k_t + (r[:, None] * k_t + n)
        across = tl.trans(tl.load(columns, mask=there[:, None], other=0))
    else:
        across = tl.trans(keys)
    of_k = inverse_norm(keys, eps, NORM)
    if not SMALL_DECAY:
        tl.store(norms + (2 * row + 1) * C + r, of_k)
    total, step = tl.zeros([C], tl.float32), tl.full([C], 1, tl.float32)
    if GATED:
        total = tl.load(g + b * g_b + h * g_h + first * g_t + r * g_t, mask=there, other=0).to(tl.float32)
        total = tl.cumsum(total * LOG2_E, 0)
    if BETA:
        step = tl.load(beta + b * beta_b + h * beta_h + first * beta_t + r * beta_t, mask=there, other=0)
        step = step.to(tl.float32)
    if not SMALL_DECAY:
        tl.store(decay + row * C + r, total)
    tl.store(steps + row * C + r, step)
    inverse += ((b * tokens + first) * heads + h) * C
    solved = tl.load(inverse + (r[:, None] * (heads * C) + r[None, :]), mask=there[:, None], other=0).to(tl.float32)
    if BETA:
        smallest = tl.min(tl.where(there, tl.abs(step), 1), 0)
        if smallest < NO_STEP:
            between = product(keys, across, WIDE) * of_k[:, None] * of_k[None, :]
            between *= tl.exp2(tl.where(r[:, None] > r[None, :], total[:, None] - total[None, :], float("-inf")))
            if SMALL_DECAY:
                between = tl.where(r[:, None] > r[None, :], between, 0)
            solved = 0 - product(between, solved * step[None, :], WIDE)
        else:
            solved = solved * (step[None, :] / tl.where(there, step, 1)[:, None])
    solved = tl.where(r[:, None] == r[None, :], 1, solved)
    tl.store(solve + row * C * C + (r[:, None] * C + r[None, :]), as_stored(solved, solve))
    queries = operand(tl.load(q + (r[:, None] * q_t + n), mask=there[:, None], other=0), WIDE)
    of_q = inverse_norm(queries, eps, NORM)
    if not SMALL_DECAY:
        tl.store(norms + 2 * row * C + r, of_q)
    scores = product(queries, across, WIDE) * (of_q * scale)[:, None] * of_k[None, :]
    scores *= tl.exp2(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf")))
    if SMALL_DECAY:  # above the diagonal a product of factors may be infinite, which a weight of 0 does not undo
        diagonal = tl.load(dots + (b * tokens + first + r) * heads + h, mask=there, other=0) * scale
        scores = tl.where(r[:, None] > r[None, :], scores, tl.where(r[:, None] == r[None, :], diagonal[:, None], 0))
    tl.store(scores_t + row * C * C + (r[:, None] * C + r[None, :]), as_stored(tl.trans(scores), scores_t))


@triton.jit
def gated_delta_rule_states(k, out_keys, v, solve, decay, steps, norms, ends, table, starts, kept, initial, states,
                            errors, tokens, chunks, heads, per_key, segments,
                            k_b, k_t, k_h, v_b, v_t, v_h,
                            EVERY: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                            CHANNELS: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr,
                            WIDE: tl.constexpr):  # fmt: skip
    """The states [b, c, h, K, V] that enter a segment's chunks, as these read them (`_triton_small_decay`), and the
    errors F [b, c, h, C, V], from `kept`, the state that enters the segment: BV of V channels, in registers from chunk
    to chunk. `CHANNELS`: gates are in k and out_keys. starts [c]: the document that begins with a chunk, or -1."""
    segment, tile, b = tl.program_id(0) % segments, tl.program_id(1), tl.program_id(2).to(tl.int64)
    h = (tl.program_id(0) // segments).to(tl.int64)
    r, n, p = tl.arange(0, C), tl.arange(0, K), tile * BV + tl.arange(0, BV)[None, :]
    k += b * k_b + h // per_key * k_h
    out_keys += b * k_b + h // per_key * k_h
    v += b * v_b + h * v_h
    at = n[:, None] * V + p
    state = tl.load(kept + ((b * segments + segment) * heads + h) * K * V + at).to(tl.float32)
    if CHANNELS:  # a chunk ahead, which the compiler does for what GEMMs multiply, not for what they add to
        coming = end_of(ends, (b * chunks + segment * EVERY) * heads + h, 0, 1, K)
    for i in range(tl.minimum(EVERY, chunks - segment * EVERY)):
        c = segment * EVERY + i
        row = (b * chunks + c) * heads + h
        if PACKED:
            document = tl.load(starts + c)
            if document >= 0:
                state = tl.zeros([K, BV], tl.float32)
                if INITIAL:
                    state += tl.load(initial + (document * heads + h) * K * V + at).to(tl.float32)
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        there = r[:, None] < length
        step = tl.load(steps + row * C + r)
        if not CHANNELS:
            total, whole = tl.load(decay + row * C + r), tl.load(decay + row * C + C - 1)
            of_k = tl.load(norms + (2 * row + 1) * C + r)
        keys = tl.load(k + first * k_t + (r[:, None] * k_t + n[None, :]), mask=there, other=0)
        values = tl.load(v + first * v_t + (r[:, None] * v_t + p), mask=there, other=0)
        solved = tl.load(solve + row * C * C + r[:, None] * C + r[None, :])
        if CHANNELS:
            writing = tl.load(out_keys + first * k_t + (r[:, None] * k_t + n[None, :]), mask=there, other=0)
            # S is what was summed, times the write factor of the chunk before: a GEMM adds to what S is carried in.
            carried = i
            if PACKED:
                carried = tl.where(document < 0, carried, 0)
            state *= tl.exp2(end_of(ends, row, 1, 1, K) + end_of(ends, row - heads, 2, carried, K))[:, None]
        entering = operand(state, WIDE)
        tl.store(states + row * K * V + at, as_stored(entering, states))
        if CHANNELS:
            error = values.to(tl.float32) - product(keys, entering, WIDE)
        else:
            error = values.to(tl.float32) - product(keys, entering, WIDE) * (of_k * tl.exp2(total))[:, None]
        error = product(solved, error, WIDE)
        tl.store(errors + row * C * V + r[:, None] * V + p, as_stored(error, errors))
        if CHANNELS:
            update = error * step[:, None]
            state *= tl.exp2(coming)[:, None]
            coming = end_of(ends, row + heads, 0, chunks - 1 - c, K)
        else:
            update = error * (of_k * step * tl.exp2(whole - total))[:, None]
            writing = keys
            state *= tl.exp2(whole)
        state = add_product(state, tl.trans(operand(writing, WIDE)), update, WIDE)


prepare = Kernel(
    gated_delta_rule_prepare,
    [{"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 1), (4, 2), (8, 1))],
    key=("heads", "C", "K", "V"),
)
states = Kernel(
    gated_delta_rule_states,
    [{"num_warps": 4, "num_stages": stages} for stages in (2, 3)],
    key=("heads", "C", "K", "V", "BV"),
)
