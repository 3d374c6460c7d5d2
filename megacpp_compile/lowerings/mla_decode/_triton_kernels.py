"""Triton kernels of `mla_decode`. A program has a block of a sequence's queries and walks a part of its rows.

Queries of all heads and new tokens of a sequence are the rows m = token * heads + head of one matrix, so that what is
read of the cache serves as many as fit into a tile. A second kernel puts the parts' results together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_math import LN_2, LOG2_E, dot


@triton.jit
def _part(lengths, b, rows, splits, l_b, BK: tl.constexpr):
    """(The sequence's length, the first and the end of this program's rows, of those there are)."""
    length = tl.load(lengths + b * l_b).to(tl.int32)
    there = tl.minimum(length, rows)
    each = tl.cdiv(tl.cdiv(there, splits), BK) * BK
    start = tl.program_id(1) * each
    return length, start, tl.minimum(start + each, there)


@triton.jit
def _weights(scores, most, total, row, last, end, scale):
    """One step of online softmax: (probabilities, what earlier sums are multiplied by, the new maximum and total).
    Of rows before `end`, a query sees those up to its `last`."""
    seen = (row < end)[None, :] & (row[None, :] <= last[:, None])
    scores = tl.where(seen, scores * (scale * LOG2_E), float("-inf"))
    new = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(scores - base[:, None])
    keep = tl.exp2(most - base)
    return p, keep, new, total * keep + tl.sum(p, 1)


@triton.jit
def _finish(part_lse, place, most, total, mine):
    """1 / total, or 1 where there was no row; and this part's lse, in base 2."""
    found = total > 0
    total = tl.where(found, total, 1.0)
    tl.store(part_lse + place, tl.where(found, most + tl.log2(total), float("-inf")), mask=mine)
    return 1.0 / total


@triton.jit
def mla_decode_rows(q, kv, row_scale, lengths, part_out, part_lse, tokens, rows, heads, splits, scale,
                    q_b, q_t, q_h, kv_b, kv_s, s_b, s_s, l_b,
                    V: tl.constexpr, VP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SCALED: tl.constexpr,
                    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
                    BH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Rows in the queries' dtype, or (SCALED) in e4m3 with a scale each. Channels are two parts, the values' (V, padded
    VP) and the rest (R, RP)."""
    scale = single(scale)
    b = tl.program_id(2).to(tl.int64)
    length, start, end = _part(lengths, b, rows, splits, l_b, BK)
    m = tl.program_id(0) * BH + tl.arange(0, BH)
    mine = m < tokens * heads
    last = length - tokens + m // heads
    v, r = tl.arange(0, VP), V + tl.arange(0, RP)
    at = q + b * q_b + (m // heads).to(tl.int64)[:, None] * q_t + (m % heads)[:, None] * q_h
    q_v = tl.load(at + v[None, :], mask=mine[:, None] & (v < V)[None, :], other=0.0)
    if R:
        q_r = tl.load(at + r[None, :], mask=mine[:, None] & (r < V + R)[None, :], other=0.0)
    kv += b * kv_b
    row_scale += b * s_b
    most = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, VP], tl.float32)
    for first in range(start, end, BK):
        row = first + tl.arange(0, BK)
        there = row < end
        line = kv + row.to(tl.int64)[:, None] * kv_s
        k_v = tl.load(line + v[None, :], mask=there[:, None] & (v < V)[None, :], other=0.0)
        if SCALED:
            its = tl.load(row_scale + row.to(tl.int64) * s_s, mask=there, other=0.0)[:, None]
            k_v = (k_v.to(tl.float32) * its).to(q_v.dtype)
        scores = dot(q_v, tl.trans(k_v), tl.zeros([BH, BK], tl.float32), PRECISION, INTERPRETED)
        if R:
            k_r = tl.load(line + r[None, :], mask=there[:, None] & (r < V + R)[None, :], other=0.0)
            if SCALED:
                k_r = (k_r.to(tl.float32) * its).to(q_v.dtype)
            scores = dot(q_r, tl.trans(k_r), scores, PRECISION, INTERPRETED)
        p, keep, most, total = _weights(scores, most, total, row, last, end, scale)
        acc = dot(p.to(k_v.dtype), k_v, acc * keep[:, None], PRECISION, INTERPRETED)
    place = ((b * tokens * heads + m) * splits + tl.program_id(1)).to(tl.int64)
    acc *= _finish(part_lse, place, most, total, mine)[:, None]
    tl.store(part_out + place[:, None] * V + v[None, :], acc, mask=mine[:, None] & (v < V)[None, :])


@triton.jit
def _channels(codebook, its, codes, like):
    """What 4-bit codes stand for, times their row's scale, in `like`'s dtype."""
    return (tl.load(codebook + codes) * its).to(like.dtype)


@triton.jit
def mla_decode_codes(q, kv, row_scale, codebook, lengths, part_out, part_lse, tokens, rows, heads, splits, scale,
                     q_b, q_t, q_h, kv_b, kv_s, s_b, s_s, s_d, l_b,
                     V: tl.constexpr, VP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
                     PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
                     BH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Rows of two channels a byte. V and R are bytes here: a byte's low bits are a channel of the first half of its
    part, its high bits one of the second, so that each half is a tile of its own and nothing is interleaved."""
    scale = single(scale)
    b = tl.program_id(2).to(tl.int64)
    length, start, end = _part(lengths, b, rows, splits, l_b, BK)
    m = tl.program_id(0) * BH + tl.arange(0, BH)
    mine = m < tokens * heads
    last = length - tokens + m // heads
    v, r = tl.arange(0, VP), tl.arange(0, RP)
    at = q + b * q_b + (m // heads).to(tl.int64)[:, None] * q_t + (m % heads)[:, None] * q_h
    of_v, of_r = mine[:, None] & (v < V)[None, :], mine[:, None] & (r < R)[None, :]
    q_low = tl.load(at + v[None, :], mask=of_v, other=0.0)
    q_high = tl.load(at + (V + v)[None, :], mask=of_v, other=0.0)
    if R:
        r_low = tl.load(at + (2 * V + r)[None, :], mask=of_r, other=0.0)
        r_high = tl.load(at + (2 * V + R + r)[None, :], mask=of_r, other=0.0)
    kv += b * kv_b
    row_scale += b * s_b
    most = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    low = tl.zeros([BH, VP], tl.float32)
    high = tl.zeros([BH, VP], tl.float32)
    for first in range(start, end, BK):
        row = first + tl.arange(0, BK)
        there = row < end
        line = kv + row.to(tl.int64)[:, None] * kv_s
        codes = tl.load(line + v[None, :], mask=there[:, None] & (v < V)[None, :], other=0).to(tl.int32)
        # A row that is not there has scale 0.
        its = tl.load(row_scale + row.to(tl.int64) * s_s, mask=there, other=0.0)[:, None]
        k_low, k_high = _channels(codebook, its, codes & 15, q_low), _channels(codebook, its, codes >> 4, q_low)
        scores = dot(q_low, tl.trans(k_low), tl.zeros([BH, BK], tl.float32), PRECISION, INTERPRETED)
        scores = dot(q_high, tl.trans(k_high), scores, PRECISION, INTERPRETED)
        if R:
            codes = tl.load(line + (V + r)[None, :], mask=there[:, None] & (r < R)[None, :], other=0).to(tl.int32)
            its = tl.load(row_scale + row.to(tl.int64) * s_s + s_d, mask=there, other=0.0)[:, None]
            scores = dot(r_low, tl.trans(_channels(codebook, its, codes & 15, q_low)), scores, PRECISION, INTERPRETED)
            scores = dot(r_high, tl.trans(_channels(codebook, its, codes >> 4, q_low)), scores, PRECISION, INTERPRETED)
        p, keep, most, total = _weights(scores, most, total, row, last, end, scale)
        p = p.to(k_low.dtype)
        low = dot(p, k_low, low * keep[:, None], PRECISION, INTERPRETED)
        high = dot(p, k_high, high * keep[:, None], PRECISION, INTERPRETED)
    place = ((b * tokens * heads + m) * splits + tl.program_id(1)).to(tl.int64)
    share = _finish(part_lse, place, most, total, mine)[:, None]
    at = part_out + place[:, None] * (2 * V) + v[None, :]
    tl.store(at, low * share, mask=of_v)
    tl.store(at + V, high * share, mask=of_v)


@triton.jit
def mla_decode_combine(part_out, part_lse, out, lse, splits, V: tl.constexpr, BV: tl.constexpr, SP: tl.constexpr,
                       BS: tl.constexpr):  # fmt: skip
    """One query's result in BV of its channels, of its parts' [splits, V], by their lse [splits] in base 2, all SP of
    them at once. A part without rows has -inf."""
    m = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    s = tl.arange(0, SP)
    each = tl.load(part_lse + m * splits + s, mask=s < splits, other=float("-inf"))
    most = tl.max(each, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp2(each - base), 0)
    found = total > 0
    total = tl.where(found, total, 1.0)
    acc = tl.zeros([BV], tl.float32)
    for first in range(0, splits, BS):
        part = first + tl.arange(0, BS)
        there = part < splits
        weight = tl.exp2(tl.load(part_lse + m * splits + part, mask=there, other=float("-inf")) - base)
        at = part_out + (m * splits + part)[:, None] * V + v[None, :]
        acc += tl.sum(weight[:, None] * tl.load(at, mask=there[:, None] & (v < V)[None, :], other=0.0), 0)
    tl.store(out + m * V + v, as_stored(acc / total, out), mask=v < V)
    if tl.program_id(1) == 0:
        tl.store(lse + m, tl.where(found, (base + tl.log2(total)) * LN_2, float("-inf")))
