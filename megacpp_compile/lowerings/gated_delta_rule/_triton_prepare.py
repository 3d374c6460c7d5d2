"""Triton kernel: all that a chunk of a head needs and no state has a part in, gates a head, or a channel of
small decay.

Norms of q and k are factors of rows, as the gates are: GEMMs read q and k as they are in memory, and what they give is
multiplied by the factors of its rows and columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._triton_inverse import unit_lower_inverse
from megacpp_compile.lowerings.gated_delta_rule._triton_tiles import chunk_tokens, dot, inverse_norm


@triton.jit
def delta_prepare(q, k, out_keys, dots, g, beta, places, inverse, mixed, factors, small_decay, tokens, heads, per_key,
                  chunks, scale, eps, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
                  C: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, SMALL_DECAY: tl.constexpr, BETA: tl.constexpr,
                  NORM: tl.constexpr, DOCUMENTS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """A chunk of a value head.

    inverse [b, tokens, heads, C]: rows of T = (I + L)^-1, L_ti = beta_t <k_t, k_i> exp(G_t - G_i) below the diagonal.
    mixed, laid out the same: scale * P T, P_ti = <q_t, k_i> exp(G_t - G_i) on and below the diagonal.
    factors [5, b, heads, tokens], float32, what the walk multiplies by: beta for v; beta * exp(G) for k S;
    scale * exp(G) for q S; exp(G_C - G) for U; exp(G_C) for S. Those of k and q have the norms in them.
    SMALL_DECAY: of chunks of small decay alone, whose gates and norms are in q, k and out_keys (`_triton_small_decay`);
    factors is beta alone.
    """
    scale, eps = single(scale), single(eps)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, end = chunk_tokens(places, tl.program_id(0), tokens, C, DOCUMENTS)
    if first >= end:
        return
    if SMALL_DECAY:
        if tl.load(small_decay + (b * chunks + tl.program_id(0)) * heads + h) == 0:
            return
    r = tl.arange(0, C)
    t = first.to(tl.int64) + r
    there = t < end
    n = tl.arange(0, K)
    keys = tl.load(k + b * k_b + h // per_key * k_h + t[:, None] * k_t + n[None, :], mask=there[:, None], other=0)
    if GATED:
        gates = tl.load(g + b * g_b + h * g_h + t * g_t, mask=there, other=0).to(tl.float32) * LOG2_E
        if WIDE:  # the difference of two sums that are large keeps float32's digits
            gates = gates.to(tl.float64)
        decay = tl.cumsum(gates, 0)
        whole = tl.sum(gates, 0)
    else:
        gates = tl.zeros([C], tl.float32)
        decay = gates
        whole = 0.0
    if BETA:
        step = tl.load(beta + b * beta_b + h * beta_h + t * beta_t, mask=there, other=0).to(tl.float32)
    else:
        step = there.to(tl.float32)
    k_norm = inverse_norm(keys, eps, NORM)
    apart = (decay[:, None] - decay[None, :]).to(tl.float32)
    apart = tl.where(r[:, None] >= r[None, :], apart, float("-inf"))
    weight = tl.exp2(apart) * k_norm[None, :]
    if SMALL_DECAY:
        columns = out_keys + b * k_b + h // per_key * k_h + t[:, None] * k_t + n[None, :]
        across = tl.trans(tl.load(columns, mask=there[:, None], other=0))
    else:
        across = tl.trans(keys)
    lower = dot(keys, across, None, WIDE) * weight * (step * k_norm)[:, None]
    solved = unit_lower_inverse(tl.where(r[:, None] > r[None, :], lower, 0.0), C, WIDE)
    row = ((b * tokens + t) * heads + h)[:, None] * C + r[None, :]
    tl.store(inverse + row, as_stored(solved, inverse), mask=there[:, None])
    # Not before: a chunk's inverse takes the registers.
    queries = tl.load(q + b * q_b + h // per_key * q_h + t[:, None] * q_t + n[None, :], mask=there[:, None], other=0)
    q_norm = inverse_norm(queries, eps, NORM) * scale
    scores = dot(queries, across, None, WIDE) * weight * q_norm[:, None]
    if SMALL_DECAY:  # above the diagonal a product of factors may be infinite, which a weight of 0 does not undo
        diagonal = tl.load(dots + (b * tokens + t) * heads + h, mask=there, other=0) * scale
        scores = tl.where(r[:, None] > r[None, :], scores, tl.where(r[:, None] == r[None, :], diagonal[:, None], 0.0))
    tl.store(mixed + row, as_stored(dot(scores, solved, None, WIDE), mixed), mask=there[:, None])
    each = (h * 0 + heads) * tokens * tl.num_programs(2)
    factors += (b * heads + h) * tokens + t
    tl.store(factors, step, mask=there)
    if not SMALL_DECAY:
        into = tl.exp2(decay.to(tl.float32))
        tl.store(factors + each, step * k_norm * into, mask=there)
        tl.store(factors + 2 * each, q_norm * into, mask=there)
        tl.store(factors + 3 * each, k_norm * tl.exp2((whole - decay).to(tl.float32)), mask=there)
        whole = tl.zeros([C], tl.float32) + tl.sum(gates, 0).to(tl.float32)
        tl.store(factors + 4 * each, tl.exp2(whole), mask=there)


prepare = Kernel(delta_prepare, [{"num_warps": w, "num_stages": 1} for w in (4, 8)], key=("heads", "C", "K"))
