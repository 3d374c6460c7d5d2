"""Triton kernel: the walk over the chunks of a head that carries its state along, and writes o on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.gated_delta_rule._triton_tiles import dot


@triton.jit
def delta_walk(q, k, out_keys, v, inverse, mixed, factors, ends, first_state, documents, bases, o, states, last,
               tokens, heads, per_key, chunks, segments, scale, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
               C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, EVERY: tl.constexpr,
               CHANNELS: tl.constexpr, FIRST: tl.constexpr, DOCUMENTS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """A head's chunks one after the other, BV of its V channels, the state S [K, BV] in registers.

    R = beta v - (beta exp(G) k) S;  U = T R;  o = (scale exp(G) q) S + (scale P T) R;
    S = exp(G_C) S + k^T (exp(G_C - G) U), with the factors that `prepare` wrote. o needs no U, so that each chunk
    multiplies three times in a row, no more.
    states [b, segments, heads, K, V]: S every `EVERY` chunks of a row; last [n, heads, K, V].
    `CHANNELS`: gates are in q, k and out_keys, factors are beta alone, ends is as `_triton_small_decay` says.
    `DOCUMENTS`: one after the other in a sequence, the n-th from documents[n] on, bases [n] its first chunk.
    """
    scale = single(scale)
    tile, h, n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r = tl.arange(0, C)
    channel, column = tl.arange(0, K), tile * BV + tl.arange(0, BV)
    if DOCUMENTS:
        b = n * 0
        first, end = tl.load(documents + n), tl.load(documents + n + 1)
        chunk = tl.load(bases + n)
    else:
        b = n
        first, end = 0, tokens
        chunk = 0
    q += b * q_b + h // per_key * q_h + channel[None, :]
    k += b * k_b + h // per_key * k_h + channel[None, :]
    out_keys += b * k_b + h // per_key * k_h + channel[None, :]
    v += b * v_b + h * v_h + column[None, :]
    at = channel[:, None] * V + column[None, :]
    every_head = n * 0 + heads  # in 64 bits
    before = every_head * 3 * K
    each = every_head * tokens * (1 if DOCUMENTS else tl.num_programs(2))
    factors += (b * heads + h) * tokens
    states += (b * segments * heads + h) * K * V + at
    ends += ((b * chunks + chunk) * heads + h) * 3 * K + channel
    state = tl.zeros([K, BV], tl.float32)
    if FIRST:
        state += tl.load(first_state + (n * heads + h) * K * V + at).to(tl.float32)
    # Nothing that only multiplies an accumulator is loaded ahead by the compiler: those are, for the next chunk, here.
    if CHANNELS:
        coming = tl.load(ends, mask=channel * 0 + (end - first) > 0, other=0)
    else:
        coming_q = tl.load(factors + 2 * each + first + r, mask=first + r < end, other=0)
        coming = tl.load(factors + 4 * each + first, mask=first < end, other=0)
    for i in range((end - first + C - 1) // C):
        token = first + i * C + r
        there = token < end
        t = token.to(tl.int64)
        keys = tl.load(k + t[:, None] * k_t, mask=there[:, None], other=0)
        queries = tl.load(q + t[:, None] * q_t, mask=there[:, None], other=0)
        values = tl.load(v + t[:, None] * v_t, mask=there[:, None], other=0)
        row = ((b * tokens + t) * heads + h)[:, None]
        solved = tl.load(inverse + row * C + r[None, :], mask=there[:, None], other=0)
        scores = tl.load(mixed + row * C + r[None, :], mask=there[:, None], other=0)
        step = tl.load(factors + t, mask=there, other=0)
        if CHANNELS:
            leaving = tl.load(out_keys + t[:, None] * k_t, mask=there[:, None], other=0)
            # S is what was summed, times the write factor of the chunk before: one load of it, and a GEMM adds to S.
            written = tl.load(ends - before + 2 * K, mask=channel * 0 + i > 0, other=0)
            enters = written + tl.load(ends + K)
            whole = tl.exp2(coming)[:, None]
            ends += before
            coming = tl.load(ends, mask=channel * 0 + first + (i + 1) * C < end, other=0)
            if (chunk + i) % EVERY == 0:
                tl.store(states + (chunk + i) // EVERY * every_head * K * V, state * tl.exp2(written)[:, None])
            state *= tl.exp2(enters)[:, None]
            operand = state if WIDE else state.to(tl.bfloat16)
            rest = (values.to(tl.float32) - dot(keys, operand, None, WIDE)) * step[:, None]
            rest = rest if WIDE else rest.to(tl.bfloat16)
            update = dot(solved, rest, None, WIDE)
            rows = dot(scores, rest, dot(queries, operand, None, WIDE) * scale, WIDE)
        else:
            leaving = keys
            into_k = tl.load(factors + each + t, mask=there, other=0)
            into_q, whole = coming_q, coming
            coming_q = tl.load(factors + 2 * each + t + C, mask=token + C < end, other=0)
            coming = tl.load(factors + 4 * each + first + (i + 1) * C, mask=first + (i + 1) * C < end, other=0)
            into_u = tl.load(factors + 3 * each + t, mask=there, other=0)
            if (chunk + i) % EVERY == 0:
                tl.store(states + (chunk + i) // EVERY * every_head * K * V, state)
            operand = state if WIDE else state.to(tl.bfloat16)
            rest = values.to(tl.float32) * step[:, None] - dot(keys, operand, None, WIDE) * into_k[:, None]
            rest = rest if WIDE else rest.to(tl.bfloat16)
            update = dot(solved, rest, None, WIDE) * into_u[:, None]
            rows = dot(scores, rest, dot(queries, operand, None, WIDE) * into_q[:, None], WIDE)
        tl.store(o + row * V + column[None, :], as_stored(rows, o), mask=there[:, None])
        state = dot(tl.trans(leaving), update, state * whole, WIDE)
    if CHANNELS:
        written = tl.load(ends - before + 2 * K, mask=channel * 0 + (end - first) > 0, other=0)
        state *= tl.exp2(written)[:, None]
    tl.store(last + (n * heads + h) * K * V + at, state)


walk = Kernel(
    delta_walk,
    [{"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (2, 3)],
    key=("heads", "C", "K", "V", "BV"),
)
