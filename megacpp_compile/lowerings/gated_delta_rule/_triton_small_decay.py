"""Triton: chunks of small decay, where no channel decays by much: gates a channel as factors of queries and keys.

The decay from token i to t is 2^(G_t - G_m) 2^(G_m - G_i), with G_m of the last row of the chunk's first half. Queries
and keys that read take the first, keys that write the second, and the chunk is one of a rule without gates, whose state
enters times 2^G_m and is written to times 2^(G_C - G_m). One of the two factors grows, so that this serves where no
channel decays by more than 2^MOST over half a chunk. Mild chunks and the others have kernels of their own
(`_triton_large_decay`, `_triton_channels`, `_triton_backward_channels`), as both in one spill registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._triton_tiles import chunk_tokens

# In powers of 2. Gradients as small as 2^-40 times the smaller factor are still above float32's smallest numbers.
MOST = tl.constexpr(64.0)


@triton.jit
def _sums(g, g_t, there, FROM: tl.constexpr, TO: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Of rows FROM to TO of gates, `there` of which are there: their sum, and that of their sizes, in powers of 2."""
    total, size = tl.zeros([K], tl.float32), tl.zeros([K], tl.float32)
    for block in range((TO - FROM) // ROWS):
        for i in tl.static_range(ROWS):
            r = FROM + block * ROWS + i
            gate = tl.load(g + r * g_t, mask=r < there, other=0).to(tl.float32) * LOG2_E
            total += gate
            size += tl.abs(gate)
    return total, size


@triton.jit
def row_norm(x, eps, NORM: tl.constexpr):
    """What normalises a row, or 1."""
    if NORM:
        return tl.rsqrt(tl.sum(x * x, 0) + eps)
    else:
        return 1.0


@triton.jit
def delta_small_decay_chunks(q, k, g, places, small_decay, queries, keys, out_keys, dots, ends, tokens, heads, per_key,
                             chunks, eps,
                      q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, C: tl.constexpr, K: tl.constexpr,
                      ROWS: tl.constexpr, NORM: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """small_decay [b, chunks, heads], int32: whether a chunk of gates g [b, tokens, heads, K] is one; of those,

    queries = q 2^(G - G_m), keys = k 2^(G - G_m), out_keys = k 2^(G_m - G), all [b, tokens, heads, K] and normed;
    dots [b, tokens, heads] = <q, k>, of which factors would round the most that is in P;
    ends [b, chunks, heads, 3, K] = 0, G_m and G_C - G_m, powers of 2: a state S that enters is read as S' = S times the
    second, and leaves as S' times the first plus out_keys^T U, times the third.
    A warp walks over the rows, ROWS unrolled, with the gates' sum in registers: tiles would take a scan or a GEMM.
    """
    eps = single(eps)
    c, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, end = chunk_tokens(places, c, tokens, C, DOCUMENTS)
    there = tl.zeros([K], tl.int32) + (end - first)
    first = first.to(tl.int64)
    n = tl.arange(0, K)
    g += b * g_b + h * g_h + first * g_t + n
    chunk = (b * chunks + c) * heads + h
    early, decay = _sums(g, g_t, there, 0, C // 2, K, ROWS)
    late, later_decay = _sums(g, g_t, there, C // 2, C, K, ROWS)
    largest = tl.max(tl.maximum(decay, later_decay), 0)
    tl.store(small_decay + chunk, (largest <= MOST).to(tl.int32))
    if largest > MOST:
        return
    ends += chunk * 3 * K + n
    tl.store(ends, tl.zeros([K], tl.float32))
    tl.store(ends + K, early)
    tl.store(ends + 2 * K, late)
    q += b * q_b + h // per_key * q_h + first * q_t + n
    k += b * k_b + h // per_key * k_h + first * k_t + n
    out = ((b * tokens + first) * heads + h) * K + n
    # A number a row is written by one lane of a row.
    dots += (b * tokens + first) * heads + h + n * 0
    apart = 0 - early
    for block in range(C // ROWS):
        for i in tl.static_range(ROWS):
            r = block * ROWS + i
            apart += tl.load(g + r * g_t, mask=r < there, other=0).to(tl.float32) * LOG2_E
            reader, at = tl.exp2(apart), out + r.to(tl.int64) * heads * K
            query = tl.load(q + r * q_t, mask=r < there, other=0).to(tl.float32)
            query *= row_norm(query, eps, NORM)
            tl.store(queries + at, as_stored(query * reader, queries), mask=r < there)
            row = tl.load(k + r * k_t, mask=r < there, other=0).to(tl.float32)
            row *= row_norm(row, eps, NORM)
            dot = tl.zeros([K], tl.float32) + tl.sum(query * row, 0)
            tl.store(dots + r.to(tl.int64) * heads, dot, mask=(n == 0) & (r < there))
            tl.store(keys + at, as_stored(row * reader, keys), mask=r < there)
            tl.store(out_keys + at, as_stored(row * tl.exp2(0 - apart), out_keys), mask=r < there)


small_decay_chunks = Kernel(
    delta_small_decay_chunks, [{"num_warps": 1, "num_stages": 1, "ROWS": n} for n in (4, 8)], key=("heads", "C", "K")
)
