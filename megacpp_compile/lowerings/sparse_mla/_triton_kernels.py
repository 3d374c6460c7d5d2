"""Triton kernels of `sparse_mla`. A program has a block of one query's heads and walks its top-k rows in tiles of BK.

The channels of a row are two parts, the values' (V of them, VP with padding) and the rest (R, RP), so that 576 channels
are tiles of 512 and 64. Rows that are not valid are loaded as zeros and never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_math import LN_2, LOG2_E, dot


@triton.jit
def _chosen(indices, j, rows, last, topk, i_k, CAUSAL: tl.constexpr):
    """Rows named at the places j, and which of them are valid."""
    index = tl.load(indices + j * i_k, mask=j < topk, other=-1).to(tl.int64)
    valid = (index >= 0) & (index < rows)
    if CAUSAL:
        valid = valid & (index <= last)
    return tl.where(valid, index, 0), valid


@triton.jit
def _row_scale(kv_scale, row, lanes, s_s, s_d, valid, BLOCKS: tl.constexpr):
    """The scale of whole rows [BK, 1], or of the block each channel is in [BK, channels]."""
    at = kv_scale + row[:, None] * s_s
    if BLOCKS:
        at += (lanes // 128)[None, :] * s_d
    return tl.load(at, mask=valid[:, None], other=1.0).to(tl.float32)


@triton.jit
def _rows(kv, kv_scale, row, lanes, there, valid, kv_s, s_s, s_d, like,
          SCALED: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Channels of a tile's rows, in `like`'s dtype."""
    found = tl.load(kv + row[:, None] * kv_s + lanes[None, :], mask=valid[:, None] & there[None, :], other=0.0)
    if SCALED:
        found = (found.to(tl.float32) * _row_scale(kv_scale, row, lanes, s_s, s_d, valid, BLOCKS)).to(like.dtype)
    return found


@triton.jit
def sparse_mla_forward(q, kv, indices, kv_scale, out, lse, tokens, rows, heads, topk, offset, scale,
                       q_b, q_t, q_h, kv_b, kv_s, i_b, i_t, i_k, s_b, s_s, s_d,
                       V: tl.constexpr, VP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, CAUSAL: tl.constexpr,
                       SCALED: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
                       BH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One pass of online softmax. The heads' blocks of a query are neighbours: they read the same rows."""
    scale = single(scale)
    across = (heads + BH - 1) // BH
    t, b = (tl.program_id(0) // across).to(tl.int64), tl.program_id(1).to(tl.int64)
    h = (tl.program_id(0) % across) * BH + tl.arange(0, BH)
    v, r = tl.arange(0, VP), V + tl.arange(0, RP)
    at = q + b * q_b + t * q_t + h[:, None] * q_h
    q_v = tl.load(at + v[None, :], mask=(h < heads)[:, None] & (v < V)[None, :], other=0.0)
    if R:
        q_r = tl.load(at + r[None, :], mask=(h < heads)[:, None] & (r < V + R)[None, :], other=0.0)
    indices += b * i_b + t * i_t
    kv += b * kv_b
    kv_scale += b * s_b
    most = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, VP], tl.float32)
    for first in range(0, topk, BK):
        row, valid = _chosen(indices, first + tl.arange(0, BK), rows, t + offset, topk, i_k, CAUSAL)
        k_v = _rows(kv, kv_scale, row, v, v < V, valid, kv_s, s_s, s_d, q_v, SCALED, BLOCKS)
        scores = dot(q_v, tl.trans(k_v), tl.zeros([BH, BK], tl.float32), PRECISION, INTERPRETED)
        if R:
            k_r = _rows(kv, kv_scale, row, r, r < V + R, valid, kv_s, s_s, s_d, q_v, SCALED, BLOCKS)
            scores = dot(q_r, tl.trans(k_r), scores, PRECISION, INTERPRETED)
        scores = tl.where(valid[None, :], scores * (scale * LOG2_E), float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(scores - base[:, None])
        keep = tl.exp2(most - base)
        total = total * keep + tl.sum(p, 1)
        acc = dot(p.to(k_v.dtype), k_v, acc * keep[:, None], PRECISION, INTERPRETED)
        most = new
    found = total > 0
    acc = acc / tl.where(found, total, 1.0)[:, None]
    place = (b * tokens + t) * heads + h
    tl.store(out + place[:, None] * V + v[None, :], as_stored(acc, out), mask=(h < heads)[:, None] & (v < V)[None, :])
    tl.store(lse + place, tl.where(found, (most + tl.log2(total)) * LN_2, float("-inf")), mask=h < heads)


@triton.jit
def _queries_and_gradients(q, grad, h, kind, q_h, g_h, v, heads, V: tl.constexpr, ALIGNED: tl.constexpr):
    """[rows, VP]: the value channels of head h's query, or of its output's gradient where `kind` is 1."""
    at = tl.where(kind == 0, q + h * q_h, grad + h * g_h)
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return tl.load(at[:, None] + v[None, :], mask=(h < heads)[:, None] & (v < V)[None, :], other=0.0)


@triton.jit
def sparse_mla_query_grad(grad, q, kv, indices, lse, delta, dq, tokens, rows, heads, topk, offset, scale,
                          g_b, g_t, g_h, q_b, q_t, q_h, kv_b, kv_s, i_b, i_t, i_k,
                          V: tl.constexpr, VP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, CAUSAL: tl.constexpr,
                          ALIGNED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
                          BH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """dq of a block of heads: the walk of the forward, with probabilities from lse.

    Queries and gradients are one tile, in turns of 8 rows: one GEMM gives scores and probabilities' gradients, of
    which a thread of the tensor cores' layout has those of one place (rows r and r + 8), and 8 warps have 128 rows to
    share, where with 64 each half of them would compute all.
    """
    scale = single(scale)
    across = (heads + BH - 1) // BH
    t, b = (tl.program_id(0) // across).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = (tl.program_id(0) % across) * BH
    v, r = tl.arange(0, VP), V + tl.arange(0, RP)
    place = tl.arange(0, 2 * BH)
    h, kind = start + place // 16 * 8 + place % 8, place // 8 % 2
    q += b * q_b + t * q_t
    both = _queries_and_gradients(q, grad + b * g_b + t * g_t, h, kind, q_h, g_h, v, heads, V, ALIGNED)
    if R:
        rest_lanes = ((h < heads) & (kind == 0))[:, None] & (r < V + R)[None, :]
        q_r = tl.load(q + h[:, None] * q_h + r[None, :], mask=rest_lanes, other=0.0)
    h = start + tl.arange(0, BH)
    place = (b * tokens + t) * heads + h
    known = tl.load(lse + place, mask=h < heads, other=0.0)
    known = tl.where(known == float("-inf"), 0.0, known) * LOG2_E
    sums = tl.load(delta + place, mask=h < heads, other=0.0)
    indices += b * i_b + t * i_t
    kv += b * kv_b
    dq_v = tl.zeros([BH, VP], tl.float32)
    dq_r = tl.zeros([BH, RP], tl.float32)
    for first in range(0, topk, BK):
        row, valid = _chosen(indices, first + tl.arange(0, BK), rows, t + offset, topk, i_k, CAUSAL)
        k_v = _rows(kv, kv, row, v, v < V, valid, kv_s, 0, 0, both, False, False)
        scores = dot(both, tl.trans(k_v), tl.zeros([2 * BH, BK], tl.float32), PRECISION, INTERPRETED)
        if R:
            k_r = _rows(kv, kv, row, r, r < V + R, valid, kv_s, 0, 0, both, False, False)
            scores = dot(q_r, tl.trans(k_r), scores, PRECISION, INTERPRETED)
        scores, dp = tl.split(tl.permute(tl.reshape(scores, [BH // 8, 2, 8, BK]), (0, 2, 3, 1)))
        scores, dp = tl.reshape(scores, [BH, BK]), tl.reshape(dp, [BH, BK])
        p = tl.exp2(tl.where(valid[None, :], scores * (scale * LOG2_E), float("-inf")) - known[:, None])
        ds = (p * (dp - sums[:, None]) * scale).to(k_v.dtype)
        dq_v = dot(ds, k_v, dq_v, PRECISION, INTERPRETED)
        if R:
            dq_r = dot(ds, k_r, dq_r, PRECISION, INTERPRETED)
    at = dq + place[:, None] * (V + R)
    tl.store(at + v[None, :], as_stored(dq_v, dq), mask=(h < heads)[:, None] & (v < V)[None, :])
    if R:
        tl.store(at + r[None, :], as_stored(dq_r, dq), mask=(h < heads)[:, None] & (r < V + R)[None, :])


@triton.jit
def sparse_mla_rows_grad(grad, q, kv, indices, lse, delta, to, tokens, rows, heads, topk, offset, scale,
                         g_b, g_t, g_h, q_b, q_t, q_h, kv_b, kv_s, i_b, i_t, i_k,
                         V: tl.constexpr, VP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, CAUSAL: tl.constexpr,
                         ALIGNED: tl.constexpr, LISTED: tl.constexpr, PRECISION: tl.constexpr,
                         INTERPRETED: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """What one query adds to the gradient of BK of its rows, summed over all heads in registers: is added to `to`, dkv
    [b, rows, V + R] (float32, zeroed), once a row and query; or, if LISTED, stored there, [b, tokens, topk, V + R].

    A head's query and gradient are rows 2i and 2i + 1 of one tile: with it one GEMM gives scores and
    probabilities' gradients, and one sum takes both parts of the rows' gradient. Two GEMMs in a row into one sum of
    this size get layouts of their own (Triton 3.9), and move it through shared memory in between.
    """
    scale = single(scale)
    tiles = (topk + BK - 1) // BK
    t, b = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    v, r = tl.arange(0, VP), V + tl.arange(0, RP)
    first = (tl.program_id(0) % tiles) * BK
    row, valid = _chosen(indices + b * i_b + t * i_t, first + tl.arange(0, BK), rows, t + offset, topk, i_k, CAUSAL)
    kv += b * kv_b
    q += b * q_b + t * q_t
    grad += b * g_b + t * g_t
    k_v = _rows(kv, kv, row, v, v < V, valid, kv_s, 0, 0, kv, False, False)
    if R:
        k_r = _rows(kv, kv, row, r, r < V + R, valid, kv_s, 0, 0, kv, False, False)
    d_v = tl.zeros([BK, VP], tl.float32)
    d_r = tl.zeros([BK, RP], tl.float32)
    pair = tl.arange(0, 2 * BH)
    for start in range(0, heads, BH):
        h = (start + pair // 2).to(tl.int64)
        both = _queries_and_gradients(q, grad, h, pair % 2, q_h, g_h, v, heads, V, ALIGNED)
        scores = dot(k_v, tl.trans(both), tl.zeros([BK, 2 * BH], tl.float32), PRECISION, INTERPRETED)
        if R:
            rest_lanes = ((h < heads) & (pair % 2 == 0))[:, None] & (r < V + R)[None, :]
            q_r = tl.load(q + h[:, None] * q_h + r[None, :], mask=rest_lanes, other=0.0)
            scores = dot(k_r, tl.trans(q_r), scores, PRECISION, INTERPRETED)
        h = start + tl.arange(0, BH)
        place = (b * tokens + t) * heads + h
        known = tl.load(lse + place, mask=h < heads, other=0.0)
        known = tl.where(known == float("-inf"), 0.0, known) * LOG2_E
        sums = tl.load(delta + place, mask=h < heads, other=0.0)
        scores, dp = tl.split(tl.reshape(scores, [BK, BH, 2]))
        p = tl.exp2(tl.where(valid[:, None], scores * (scale * LOG2_E), float("-inf")) - known[None, :])
        ds = p * (dp - sums[None, :]) * scale
        weights = tl.reshape(tl.join(ds, p), [BK, 2 * BH]).to(both.dtype)
        d_v = dot(weights, both, d_v, PRECISION, INTERPRETED)
        if R:
            d_r = dot(weights, q_r, d_r, PRECISION, INTERPRETED)
    if LISTED:
        at = to + ((b * tokens + t) * topk + first + tl.arange(0, BK))[:, None] * (V + R)
        tl.store(at + v[None, :], as_stored(d_v, to), mask=valid[:, None] & (v < V)[None, :])
        if R:
            tl.store(at + r[None, :], as_stored(d_r, to), mask=valid[:, None] & (r < V + R)[None, :])
    else:
        at = to + (b * rows + row)[:, None] * (V + R)
        tl.atomic_add(at + v[None, :], d_v, mask=valid[:, None] & (v < V)[None, :], sem="relaxed")
        if R:
            tl.atomic_add(at + r[None, :], d_r, mask=valid[:, None] & (r < V + R)[None, :], sem="relaxed")


@triton.jit
def sparse_mla_add_lists(parts, pairs, starts, dkv, CHANNELS: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr):
    """Adds to some channels of a row of dkv (float32) what the pairs in its list have stored, in their order."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    total = tl.zeros([BN, LANES], tl.float32)
    for first in range(start, end, BN):
        place = first + tl.arange(0, BN)
        pair = tl.load(pairs + place, mask=place < end, other=0)
        there = (place < end)[:, None] & (lane < CHANNELS)[None, :]
        total += tl.load(parts + pair[:, None] * CHANNELS + lane[None, :], mask=there, other=0.0).to(tl.float32)
    at = dkv + row * CHANNELS + lane
    tl.store(at, tl.load(at, mask=lane < CHANNELS, other=0.0) + tl.sum(total, 0), mask=lane < CHANNELS)
