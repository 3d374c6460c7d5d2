"""Triton kernel of `attention`, and what it shares with those of the backward (`_triton_backward`).

Channels of queries and keys are two parts, A (a power of 2) and the rest R, so that 192 channels are tiles of 128 and
64. Blocks of keys that no query of a block sees by their distance are not visited; of those visited, only the ones at
the edges compare distances (`EDGE`). Without mask and bias scores are in base 2 (`WIDE` is false); with them they may
be as low as float32 goes, and are multiplied by log2(e) only after a row's largest is taken off.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import INTERPRETED, as_stored, single
from megacpp_compile.lowerings._kernels.triton_math import LN_2, LOG2_E, dot, power_of_two, sigmoid
from megacpp_compile.lowerings.attention._triton_dropout import kept, words_of_keys, words_of_queries


@triton.jit
def tile(base, rows, lanes, step, most, width, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Rows of a matrix, [rows, lanes]; zeros beyond its `most` rows (ROWS: there may be such) and `width` channels."""
    at = base + rows[:, None] * step + lanes[None, :]
    if ROWS and LANES:
        return tl.load(at, mask=(rows < most)[:, None] & (lanes < width)[None, :], other=0.0)
    elif ROWS:
        return tl.load(at, mask=(rows < most)[:, None], other=0.0)
    elif LANES:
        return tl.load(at, mask=(lanes < width)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def capped_scores(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores before bias and mask."""
    if SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1: exact to float32's rounding of softcap, where the scores are
        return 2 * softcap * sigmoid(products * (2 * scale / softcap), INTERPRETED) - softcap
    else:
        return products * scale


@triton.jit
def beside(base, i, j, tokens, keys, step_t, step_s, KIND: tl.constexpr):
    """What stands beside the scores: a number for each key where KIND is 1, for each query and key where it is 2."""
    if KIND == 1:
        return tl.load(base + j * step_s, mask=j < keys, other=0)
    else:
        return tl.load(base + i * step_t + j * step_s, mask=(i < tokens) & (j < keys), other=0)


@triton.jit
def hidden_scores(scores, i, j, tokens, keys, left, right, opened, mask, bias, m_t, m_s, b_t, b_s, fill, documents,
                  MASK: tl.constexpr, BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                  DOCUMENTS: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Scores with the bias, and hidden where queries i do not see keys j; i and j are of shapes that broadcast to
    those of the scores."""
    if BIAS:
        scores += beside(bias, i, j, tokens, keys, b_t, b_s, BIAS).to(tl.float32)
    if MASK:
        scores = tl.where(beside(mask, i, j, tokens, keys, m_t, m_s, MASK) != 0, scores, fill)
    if EDGE:
        near = j < keys
        if LEFT:
            near = near & (j >= i - left)
        if RIGHT:
            near = near & (j <= tl.maximum(i + right, opened - 1))
        if DOCUMENTS:
            own = tl.load(documents + i, mask=i < tokens, other=0)
            near = near & (tl.load(documents + j, mask=j < keys, other=0) == own)
        scores = tl.where(near, scores, float("-inf"))
    return scores


@triton.jit
def weights_of(products, i, j, known, above, tokens, keys, left, right, opened, scale, softcap, mask, bias, m_t, m_s,
               b_t, b_s, fill, documents, MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
               LEFT: tl.constexpr, RIGHT: tl.constexpr, DOCUMENTS: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """(probabilities, what a score's gradient is multiplied by before its products', the scores, -inf where hidden);
    `known` is lse in base 2."""
    capped = capped_scores(products, scale, softcap, SOFTCAP)
    scores = hidden_scores(capped, i, j, tokens, keys, left, right, opened, mask, bias, m_t, m_s, b_t, b_s, fill,
                           documents, MASK, BIAS, LEFT, RIGHT, DOCUMENTS, EDGE)  # fmt: skip
    if MASK or BIAS:
        p = power_of_two((scores - above) * LOG2_E - known)
    else:
        p = power_of_two(scores * LOG2_E - known)
    if EDGE:  # rows and keys that are not there
        p = tl.where((i < tokens) & (j < keys), p, 0.0)
    slope = capped
    if SOFTCAP:
        part = capped * (1 / softcap)
        slope = 1 - part * part
    return p, slope, scores


@triton.jit
def _forward_block(acc, total, most, q_a, q_r, k, v, mask, bias, first, i, tokens, keys, left, right, opened, scale,
                   softcap, fill, documents, row_a, row_b, words, least, k_s, v_s, m_t, m_s, b_t, b_s, D: tl.constexpr,
                   A: tl.constexpr, R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASK: tl.constexpr,
                   BIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                   DOCUMENTS: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
                   INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One block of keys more in the online softmax."""
    j = first + tl.arange(0, BN)
    k_a = tile(k, j, tl.arange(0, A), k_s, keys, D, EDGE, A > D)
    products = dot(q_a, tl.trans(k_a), tl.zeros([BM, BN], tl.float32), PRECISION, INTERPRETED)
    if R:
        k_r = tile(k, j, A + tl.arange(0, R), k_s, keys, D, EDGE, A + R > D)
        products = dot(q_r, tl.trans(k_r), products, PRECISION, INTERPRETED)
    scores = capped_scores(products, scale, softcap, SOFTCAP)
    scores = hidden_scores(scores, i[:, None], j[None, :], tokens, keys, left, right, opened, mask, bias, m_t, m_s, b_t,
                           b_s, fill, documents, MASK, BIAS, LEFT, RIGHT, DOCUMENTS, EDGE)  # fmt: skip
    new = tl.maximum(most, tl.max(scores, 1))
    base = new
    if EDGE or MASK or BIAS:  # else every score is a number
        base = tl.where(new == float("-inf"), 0.0, new)
    if MASK or BIAS:
        p, keep = power_of_two((scores - base[:, None]) * LOG2_E), power_of_two((most - base) * LOG2_E)
    else:
        p, keep = power_of_two(scores - base[:, None]), power_of_two(most - base)
    total = total * keep + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(kept(row_a[:, None], row_b[:, None], words_of_keys(words, j, keys)[None, :], least), p, 0.0)
    values = tile(v, j, tl.arange(0, EP), v_s, keys, E, EDGE, EP > E)
    acc = dot(p.to(values.dtype), values, acc * keep[:, None], PRECISION, INTERPRETED)
    return acc, total, new


@triton.jit
def opened_keys(prefix, b, p_b, PREFIX: tl.constexpr):
    """The number of the first keys that all queries see."""
    if PREFIX:
        return tl.load(prefix + b * p_b)
    else:
        return 0


@triton.jit
def blocks_of_keys(m0, tokens, keys, left, right, opened, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr):  # fmt: skip
    """(first key, first of a block all of whose keys all queries m0 to m0 + BM see, the end of such, the end) of the
    keys that these queries see, at borders of blocks."""
    first, whole, end = 0, 0, keys
    whole_end = keys // BN * BN
    if RIGHT:
        end = tl.maximum(tl.minimum(keys, tl.maximum(tl.minimum(m0 + BM, tokens) + right, opened)), 0)
        whole_end = tl.minimum(whole_end, tl.maximum(tl.maximum(m0 + right + 1, opened), 0) // BN * BN)
    if LEFT:
        first = tl.minimum(tl.maximum(m0 - left, 0), keys) // BN * BN
        whole = tl.maximum(tl.minimum(m0 + BM, tokens) - 1 - left + BN - 1, 0) // BN * BN
    whole = tl.maximum(whole, first)
    whole_end = tl.maximum(whole_end, whole)
    end = tl.maximum(end, first)
    whole = tl.minimum(whole, (end + BN - 1) // BN * BN)
    whole_end = tl.minimum(whole_end, (end + BN - 1) // BN * BN)
    return first, whole, whole_end, end


@triton.jit
def within_documents(spans, units, own, first, whole, whole_end, end, OWN: tl.constexpr, OTHER: tl.constexpr):
    """What a block of OWN tokens from `own` on sees, as `blocks_of_keys` has it, less what is of no document of theirs:
    by units of 64 tokens; all but the end at borders of blocks of OTHER."""
    unit = own // 64 + tl.arange(0, OWN // 64 if OWN > 64 else 1)
    there = unit < units
    least = tl.min(tl.load(spans + unit * 4, mask=there, other=units), 0) * 64
    most = tl.max(tl.load(spans + unit * 4 + 1, mask=there, other=0), 0) * 64
    alone = tl.max(tl.load(spans + unit * 4 + 2, mask=there, other=0), 0) * 64
    mixed = tl.min(tl.load(spans + unit * 4 + 3, mask=there, other=units), 0) * 64
    first = tl.maximum(first, least // OTHER * OTHER)
    end = tl.maximum(tl.minimum(end, most), first)
    last = (end + OTHER - 1) // OTHER * OTHER
    whole = tl.minimum(tl.maximum(tl.maximum(whole, (alone + OTHER - 1) // OTHER * OTHER), first), last)
    whole_end = tl.minimum(tl.maximum(tl.minimum(whole_end, mixed // OTHER * OTHER), whole), last)
    return first, whole, whole_end, end


@triton.jit
def attention_forward(q, k, v, mask, bias, sinks, out, lse, top, tokens, keys, left, right, scale, softcap, fill,
                      documents, spans, words, least, factor, units, d_b, s_b, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h,
                      v_s, m_b, m_h, m_t, m_s, b_b, b_h, b_t, b_s, o_b, o_h, o_t, x_b, x_h, x_t, prefix, p_b,
                      HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, A: tl.constexpr, R: tl.constexpr,
                      E: tl.constexpr, EP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr,
                      SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DOCUMENTS: tl.constexpr,
                      PREFIX: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    scale, softcap, fill, factor = single(scale), single(softcap), single(fill), single(factor)
    WIDE: tl.constexpr = MASK + BIAS > 0
    if not WIDE:  # scores in base 2
        if SOFTCAP:
            scale *= LOG2_E
            softcap *= LOG2_E
        else:
            scale *= LOG2_E
    # Blocks with most keys first.
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = m0 + tl.arange(0, BM)
    q += b * q_b + h.to(tl.int64) * q_h
    g = (h // GROUP).to(tl.int64)
    k += b * k_b + g * k_h
    v += b * v_b + g * v_h
    mask += b * m_b + h.to(tl.int64) * m_h
    bias += b * b_b + h.to(tl.int64) * b_h
    documents += b * d_b
    q_a = tile(q, i, tl.arange(0, A), q_t, tokens, D, True, A > D)
    q_r = q_a
    if R:
        q_r = tile(q, i, A + tl.arange(0, R), q_t, tokens, D, True, A + R > D)
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINKS:
        sinks += b * x_b + h.to(tl.int64) * x_h
        most = tl.load(sinks + i.to(tl.int64) * x_t, mask=i < tokens, other=0).to(tl.float32)
        if not WIDE:
            most *= LOG2_E
        total += 1
    acc = tl.zeros([BM, EP], tl.float32)
    row_a, row_b = i, i
    if DROPOUT:
        row_a, row_b = words_of_queries(words, keys, (b * HEADS + h) * tokens, i, tokens)
    opened = opened_keys(prefix, b, p_b, PREFIX)
    first, whole, whole_end, end = blocks_of_keys(m0, tokens, keys, left, right, opened, LEFT, RIGHT, BM, BN)
    if DOCUMENTS:
        spans += b * s_b
        first, whole, whole_end, end = within_documents(spans, units, m0, first, whole, whole_end, end, BM, BN)
    if LEFT or DOCUMENTS:
        for n in range(first, whole, BN):
            acc, total, most = _forward_block(acc, total, most, q_a, q_r, k, v, mask, bias, n, i, tokens, keys, left,
                                              right, opened, scale, softcap, fill, documents, row_a, row_b, words,
                                              least, k_s, v_s, m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS, SOFTCAP,
                                              LEFT, RIGHT, DOCUMENTS, DROPOUT, True, PRECISION, INTERPRETED, BM,
                                              BN)  # fmt: skip
    for n in range(whole, whole_end, BN):
        acc, total, most = _forward_block(acc, total, most, q_a, q_r, k, v, mask, bias, n, i, tokens, keys, left, right,
                                          opened, scale, softcap, fill, documents, row_a, row_b, words, least, k_s, v_s,
                                          m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS, SOFTCAP, LEFT, RIGHT,
                                          DOCUMENTS, DROPOUT, False, PRECISION, INTERPRETED, BM, BN)  # fmt: skip
    for n in range(whole_end, end, BN):
        acc, total, most = _forward_block(acc, total, most, q_a, q_r, k, v, mask, bias, n, i, tokens, keys, left, right,
                                          opened, scale, softcap, fill, documents, row_a, row_b, words, least, k_s, v_s,
                                          m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS, SOFTCAP, LEFT, RIGHT,
                                          DOCUMENTS, DROPOUT, True, PRECISION, INTERPRETED, BM, BN)  # fmt: skip
    acc = acc / total[:, None]
    if DROPOUT:
        acc *= factor
    e = tl.arange(0, EP)
    out += b * o_b + h.to(tl.int64) * o_h
    tl.store(out + i[:, None] * o_t + e[None, :], as_stored(acc, out), mask=(i < tokens)[:, None] & (e < E)[None, :])
    row = (b * HEADS + h) * tokens + i
    if WIDE:
        tl.store(lse + row, tl.log2(total) * LN_2, mask=i < tokens)
        tl.store(top + row, most, mask=i < tokens)
    else:
        tl.store(lse + row, (most + tl.log2(total)) * LN_2, mask=i < tokens)
