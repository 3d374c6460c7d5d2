"""Triton kernel: all that a chunk of a head needs and no state has a part in, gates a channel.

Decay between two tokens, exp(G_t - G_i), is now inside the sum over channels, and has to be made of two factors, one
for each GEMM operand, neither of which may grow. So pairs of tokens are told apart by halves: a chunk is cut in two,
then each half, down to single rows, and a pair belongs to the cut that parts it. With G_m at the cut, the first row
behind it, both factors are exp(-|G - G_m|) <= 1, and one GEMM of the chunk serves all cuts of one size. Chunks that
decay little are not this kernel's (`_triton_small_decay`, `_triton_large_decay`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._triton_inverse import unit_lower_inverse
from megacpp_compile.lowerings.gated_delta_rule._triton_large_decay import nth_chunk, share
from megacpp_compile.lowerings.gated_delta_rule._triton_tiles import chunk_tokens, dot, inverse_norm, sums

# Channels that a program takes at once: their tiles fit into registers.
AT_ONCE = 64


@triton.jit
def to_cut(r, c, log):
    """[t, j]: whether token j lies between t and the first row behind the cut of its block of 2 << log rows."""
    t, j = r[:, None], c[None, :]
    cut = (t >> (log + 1) << (log + 1)) + (1 << log)
    return ((j > cut) & (j <= t)) | ((j > t) & (j <= cut))


@triton.jit
def load_rows(x, x_t, n, there):
    """Channels n of the rows of x that are there."""
    r = tl.arange(0, there.shape[0])
    return tl.load(x + (r[:, None] * x_t + n[None, :]), mask=there[:, None], other=0)


@triton.jit
def delta_prepare_channels(q, k, g, beta, places, inverse, mixed, factors, gated_q, gated_k, out_keys, ends,
                           large_decay, tokens, heads, per_key, chunks, scale, eps, q_b, q_t, q_h, k_b, k_t, k_h,
                           g_b, g_t, g_h, beta_b, beta_t, beta_h, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                           SKIP: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, DOCUMENTS: tl.constexpr,
                           WIDE: tl.constexpr):  # fmt: skip
    """Chunks of value heads: `inverse` and `mixed` as `delta_prepare`.

    gated_q = q exp(G), gated_k = k exp(G), out_keys = k exp(G_C - G), all [b, tokens, heads, K] and normed;
    ends [b, chunks, heads, 3, K] = G_C in powers of 2, and twice 0 (`_triton_small_decay`). SKIP: leaves out chunks of
    small decay. factors is beta alone.
    """
    scale, eps = single(scale), single(eps)
    start, stop, stride = share(large_decay, SKIP)
    for i in tl.range(start, stop, stride, disable_licm=True):
        c, h, b = nth_chunk(large_decay, i, chunks, heads, SKIP)
        first, end = chunk_tokens(places, c, tokens, C, DOCUMENTS)
        if first < end:
            r = tl.arange(0, C)
            there = r < end - first
            begin = first.to(tl.int64)
            q_rows = q + b * q_b + h // per_key * q_h + begin * q_t
            k_rows = k + b * k_b + h // per_key * k_h + begin * k_t
            g_rows = g + b * g_b + h * g_h + begin * g_t
            every = tl.arange(0, K)
            chunk = (b * chunks + c) * heads + h
            k_norm = inverse_norm(load_rows(k_rows, k_t, every, there), eps, NORM)
            q_norm = inverse_norm(load_rows(q_rows, q_t, every, there), eps, NORM)
            if BETA:
                beta_rows = beta + b * beta_b + h * beta_h + begin * beta_t
                step = tl.load(beta_rows + r * beta_t, mask=there, other=0).to(tl.float32)
            else:
                step = there.to(tl.float32)
            out = (b * tokens + begin) * heads + h
            lower = tl.zeros([C, C], tl.float32)
            scores = tl.zeros([C, C], tl.float32)
            for part in range(K // BK):
                n = part * BK + tl.arange(0, BK)
                keys = load_rows(k_rows, k_t, n, there).to(tl.float32) * k_norm[:, None]
                queries = load_rows(q_rows, q_t, n, there).to(tl.float32) * q_norm[:, None]
                gates = load_rows(g_rows, g_t, n, there).to(tl.float32) * LOG2_E
                at = r[:, None] * (heads * K) + n[None, :]
                decay = tl.exp2(sums(r[:, None] >= r[None, :], gates, WIDE))
                tl.store(gated_q + out * K + at, as_stored(queries * decay, gated_q), mask=there[:, None])
                tl.store(gated_k + out * K + at, as_stored(keys * decay, gated_k), mask=there[:, None])
                decay = tl.exp2(sums(r[:, None] < r[None, :], gates, WIDE))
                tl.store(out_keys + out * K + at, as_stored(keys * decay, out_keys), mask=there[:, None])
                tl.store(ends + chunk * 3 * K + n, tl.sum(gates, 0))
                tl.store(ends + chunk * 3 * K + K + n, tl.zeros([BK], tl.float32))
                tl.store(ends + chunk * 3 * K + 2 * K + n, tl.zeros([BK], tl.float32))
                scores += tl.where(r[:, None] == r[None, :], tl.sum(queries * keys, 1)[:, None], 0.0)
                for log in range(4 + C // 32):
                    decay = tl.exp2(sums(to_cut(r, r, log), gates, WIDE))
                    parted = ((r[:, None] ^ r[None, :]) >> log == 1) & (r[:, None] > r[None, :])
                    across = tl.trans(keys * decay)
                    lower += tl.where(parted, dot(keys * decay, across, None, WIDE), 0.0)
                    scores += tl.where(parted, dot(queries * decay, across, None, WIDE), 0.0)
            solved = unit_lower_inverse(lower * step[:, None], C, WIDE)
            at = r[:, None] * (heads * C) + r[None, :]
            tl.store(inverse + out * C + at, as_stored(solved, inverse), mask=there[:, None])
            scores = dot(scores * scale, solved, None, WIDE)
            tl.store(mixed + out * C + at, as_stored(scores, mixed), mask=there[:, None])
            tl.store(factors + (b * heads + h) * tokens + begin + r, step, mask=there)


prepare = Kernel(delta_prepare_channels, [{"num_warps": w, "num_stages": 1} for w in (4, 8)], key=("heads", "C", "K"))
