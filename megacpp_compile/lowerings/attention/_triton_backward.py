"""Triton kernels of `attention`'s backward: three, each of which computes the scores anew, so that none adds to memory
that another program writes."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored, single
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E, dot
from megacpp_compile.lowerings.attention._triton_dropout import kept, words_of_keys, words_of_queries
from megacpp_compile.lowerings.attention._triton_kernels import (
    beside,
    blocks_of_keys,
    opened_keys,
    tile,
    weights_of,
    within_documents,
)


@triton.jit
def _score_gradient(p, dp, delta, slope, scores, i, j, tokens, keys, mask, m_t, m_s, MASK: tl.constexpr,
                    SOFTCAP: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """(gradients of the scores, of the products but for their scale). A hidden score has none, be that of its query no
    number."""
    ds = p * (dp - delta)
    if EDGE:
        ds = tl.where(scores == float("-inf"), 0.0, ds)
    if MASK:
        ds = tl.where(beside(mask, i, j, tokens, keys, m_t, m_s, MASK) != 0, ds, 0.0)
    if SOFTCAP:
        return ds, ds * slope
    else:
        return ds, ds


@triton.jit
def _query_grad_block(dq_a, dq_r, q_a, q_r, do, k, v, mask, bias, n, i, known, above, delta, tokens, keys, left, right,
                      opened, scale, softcap, fill, documents, row_a, row_b, words, least, factor, k_s, v_s, m_t, m_s,
                      b_t, b_s, D: tl.constexpr, A: tl.constexpr, R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
                      MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
                      RIGHT: tl.constexpr, DOCUMENTS: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr,
                      PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr):  # fmt: skip
    j = n + tl.arange(0, BN)
    k_a = tile(k, j, tl.arange(0, A), k_s, keys, D, EDGE, A > D)
    products = dot(q_a, tl.trans(k_a), tl.zeros([BM, BN], tl.float32), PRECISION, INTERPRETED)
    if R:
        k_r = tile(k, j, A + tl.arange(0, R), k_s, keys, D, EDGE, A + R > D)
        products = dot(q_r, tl.trans(k_r), products, PRECISION, INTERPRETED)
    p, slope, scores = weights_of(products, i[:, None], j[None, :], known[:, None], above[:, None], tokens, keys, left,
                                  right, opened, scale, softcap, mask, bias, m_t, m_s, b_t, b_s, fill, documents, MASK,
                                  BIAS, SOFTCAP, LEFT, RIGHT, DOCUMENTS, EDGE)  # fmt: skip
    values = tile(v, j, tl.arange(0, EP), v_s, keys, E, EDGE, EP > E)
    dp = dot(do, tl.trans(values), tl.zeros([BM, BN], tl.float32), PRECISION, INTERPRETED)
    if DROPOUT:
        there = kept(row_a[:, None], row_b[:, None], words_of_keys(words, j, keys)[None, :], least)
        dp = tl.where(there, dp * factor, 0.0)
    _, ds = _score_gradient(p, dp, delta[:, None], slope, scores, i[:, None], j[None, :], tokens, keys, mask, m_t, m_s,
                            MASK, SOFTCAP, EDGE)  # fmt: skip
    ds = ds.to(k_a.dtype)
    dq_a = dot(ds, k_a, dq_a, PRECISION, INTERPRETED)
    if R:
        dq_r = dot(ds, k_r, dq_r, PRECISION, INTERPRETED)
    return dq_a, dq_r


@triton.jit
def attention_query_grad(grad, q, k, v, mask, bias, lse, top, delta, dq, tokens, keys, left, right, scale, softcap,
                         fill, documents, spans, words, least, factor, units, d_b, s_b, g_b, g_h, g_t, q_b, q_h, q_t,
                         k_b, k_h, k_s, v_b, v_h, v_s, m_b, m_h, m_t, m_s, b_b, b_h, b_t, b_s, o_b, o_h, o_t, prefix,
                         p_b, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, A: tl.constexpr,
                         R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
                         SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DOCUMENTS: tl.constexpr,
                         PREFIX: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
                         INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """dq [b, h, t, d]: the forward's walk, with probabilities from lse."""
    scale, softcap, fill, factor = single(scale), single(softcap), single(fill), single(factor)
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = m0 + tl.arange(0, BM)
    g = (h // GROUP).to(tl.int64)
    q += b * q_b + h.to(tl.int64) * q_h
    grad += b * g_b + h.to(tl.int64) * g_h
    k += b * k_b + g * k_h
    v += b * v_b + g * v_h
    mask += b * m_b + h.to(tl.int64) * m_h
    bias += b * b_b + h.to(tl.int64) * b_h
    documents += b * d_b
    q_a = tile(q, i, tl.arange(0, A), q_t, tokens, D, True, A > D)
    q_r = q_a
    dq_a = tl.zeros([BM, A], tl.float32)
    dq_r = dq_a
    if R:
        q_r = tile(q, i, A + tl.arange(0, R), q_t, tokens, D, True, A + R > D)
        dq_r = tl.zeros([BM, R], tl.float32)
    do = tile(grad, i, tl.arange(0, EP), g_t, tokens, E, True, EP > E)
    row = (b * HEADS + h) * tokens + i
    known = tl.load(lse + row, mask=i < tokens, other=0.0) * LOG2_E
    sums = tl.load(delta + row, mask=i < tokens, other=0.0)
    above = sums
    if MASK or BIAS:
        above = tl.load(top + row, mask=i < tokens, other=0.0)
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
            dq_a, dq_r = _query_grad_block(dq_a, dq_r, q_a, q_r, do, k, v, mask, bias, n, i, known, above, sums, tokens,
                                           keys, left, right, opened, scale, softcap, fill, documents, row_a, row_b,
                                           words, least, factor, k_s, v_s, m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK,
                                           BIAS, SOFTCAP, LEFT, RIGHT, DOCUMENTS, DROPOUT, True, PRECISION, INTERPRETED,
                                           BM, BN)  # fmt: skip
    for n in range(whole, whole_end, BN):
        dq_a, dq_r = _query_grad_block(dq_a, dq_r, q_a, q_r, do, k, v, mask, bias, n, i, known, above, sums, tokens,
                                       keys, left, right, opened, scale, softcap, fill, documents, row_a, row_b, words,
                                       least, factor, k_s, v_s, m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS, SOFTCAP,
                                       LEFT, RIGHT, DOCUMENTS, DROPOUT, False, PRECISION, INTERPRETED, BM,
                                       BN)  # fmt: skip
    for n in range(whole_end, end, BN):
        dq_a, dq_r = _query_grad_block(dq_a, dq_r, q_a, q_r, do, k, v, mask, bias, n, i, known, above, sums, tokens,
                                       keys, left, right, opened, scale, softcap, fill, documents, row_a, row_b, words,
                                       least, factor, k_s, v_s, m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS, SOFTCAP,
                                       LEFT, RIGHT, DOCUMENTS, DROPOUT, True, PRECISION, INTERPRETED, BM,
                                       BN)  # fmt: skip
    a = tl.arange(0, A)
    at = dq + b * o_b + h.to(tl.int64) * o_h + i[:, None] * o_t
    tl.store(at + a[None, :], as_stored(dq_a * scale, dq), mask=(i < tokens)[:, None] & (a < D)[None, :])
    if R:
        r = A + tl.arange(0, R)
        tl.store(at + r[None, :], as_stored(dq_r * scale, dq), mask=(i < tokens)[:, None] & (r < D)[None, :])


@triton.jit
def _keys_grad_block(dk_a, dk_r, dv, k_a, k_r, values, q, grad, mask, bias, lse, top, delta, m, j, tokens, keys, left,
                     right, opened, scale, softcap, fill, documents, words, row, of_keys, least, factor, q_t, g_t, m_t,
                     m_s, b_t, b_s, D: tl.constexpr, A: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
                     EP: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
                     LEFT: tl.constexpr, RIGHT: tl.constexpr, DOCUMENTS: tl.constexpr, DROPOUT: tl.constexpr,
                     EDGE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr):  # fmt: skip
    """Of one block of queries, whose scores are [keys, queries] here."""
    i = m + tl.arange(0, BM)
    q_a = tile(q, i, tl.arange(0, A), q_t, tokens, D, EDGE, A > D)
    products = dot(k_a, tl.trans(q_a), tl.zeros([BN, BM], tl.float32), PRECISION, INTERPRETED)
    if R:
        q_r = tile(q, i, A + tl.arange(0, R), q_t, tokens, D, EDGE, A + R > D)
        products = dot(k_r, tl.trans(q_r), products, PRECISION, INTERPRETED)
    known = tl.load(lse + i, mask=i < tokens, other=0.0) * LOG2_E
    sums = tl.load(delta + i, mask=i < tokens, other=0.0)
    above = sums
    if MASK or BIAS:
        above = tl.load(top + i, mask=i < tokens, other=0.0)
    p, slope, scores = weights_of(products, i[None, :], j[:, None], known[None, :], above[None, :], tokens, keys, left,
                                  right, opened, scale, softcap, mask, bias, m_t, m_s, b_t, b_s, fill, documents, MASK,
                                  BIAS, SOFTCAP, LEFT, RIGHT, DOCUMENTS, EDGE)  # fmt: skip
    do = tile(grad, i, tl.arange(0, EP), g_t, tokens, E, EDGE, EP > E)
    dropped = p
    if DROPOUT:
        row_a, row_b = words_of_queries(words, keys, row, i, tokens)
        there = kept(row_a[None, :], row_b[None, :], of_keys[:, None], least)
        dropped = tl.where(there, p, 0.0)
    dv = dot(dropped.to(do.dtype), do, dv, PRECISION, INTERPRETED)
    dp = dot(values, tl.trans(do), tl.zeros([BN, BM], tl.float32), PRECISION, INTERPRETED)
    if DROPOUT:
        dp = tl.where(there, dp * factor, 0.0)
    _, ds = _score_gradient(p, dp, sums[None, :], slope, scores, i[None, :], j[:, None], tokens, keys, mask, m_t, m_s,
                            MASK, SOFTCAP, EDGE)  # fmt: skip
    ds = ds.to(q_a.dtype)
    dk_a = dot(ds, q_a, dk_a, PRECISION, INTERPRETED)
    if R:
        dk_r = dot(ds, q_r, dk_r, PRECISION, INTERPRETED)
    return dk_a, dk_r, dv


@triton.jit
def attention_keys_grad(grad, q, k, v, mask, bias, lse, top, delta, dk, dv, tokens, keys, left, right, scale, softcap,
                        fill, documents, spans, words, least, factor, units, d_b, s_b, g_b, g_h, g_t, q_b, q_h, q_t,
                        k_b, k_h, k_s, v_b, v_h, v_s, m_b, m_h, m_t, m_s, b_b, b_h, b_t, b_s, dk_b, dk_h, dk_s, dv_b,
                        dv_h, dv_s, prefix, p_b, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
                        A: tl.constexpr, R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASK: tl.constexpr,
                        BIAS: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                        DOCUMENTS: tl.constexpr, PREFIX: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
                        INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """dk, dv [b, g, s, .] of a block of keys, over all queries of its heads that see some of it."""
    scale, softcap, fill, factor = single(scale), single(softcap), single(fill), single(factor)
    n0 = tl.program_id(0) * BN
    g, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    j = n0 + tl.arange(0, BN)
    k += b * k_b + g * k_h
    v += b * v_b + g * v_h
    mask += b * m_b
    bias += b * b_b
    documents += b * d_b
    k_a = tile(k, j, tl.arange(0, A), k_s, keys, D, True, A > D)
    k_r = k_a
    dk_a = tl.zeros([BN, A], tl.float32)
    dk_r = dk_a
    if R:
        k_r = tile(k, j, A + tl.arange(0, R), k_s, keys, D, True, A + R > D)
        dk_r = tl.zeros([BN, R], tl.float32)
    values = tile(v, j, tl.arange(0, EP), v_s, keys, E, True, EP > E)
    grad_v = tl.zeros([BN, EP], tl.float32)
    opened = opened_keys(prefix, b, p_b, PREFIX)
    # Queries that see a key of the block; those between `whole` and `whole_end` see all of them, blocks at borders.
    first, whole, end = 0, 0, tokens
    whole_end = tokens // BM * BM
    if RIGHT:
        first = tl.minimum(tl.maximum(n0 - right, 0), tokens) // BM * BM
        whole = tl.maximum(n0 + BN - 1 - right + BM - 1, 0) // BM * BM
    if PREFIX:
        first = tl.where(n0 < opened, 0, first)
        whole = tl.where(n0 + BN <= opened, 0, whole)
    if LEFT:
        end = tl.maximum(tl.minimum(tokens, tl.minimum(n0 + BN, keys) + left), 0)
        whole_end = tl.minimum(whole_end, tl.maximum(n0 + left + 1, 0) // BM * BM)
    if n0 + BN > keys:
        whole_end = 0
    end = tl.maximum(end, first)
    last = (end + BM - 1) // BM * BM
    whole = tl.minimum(tl.maximum(whole, first), last)
    whole_end = tl.minimum(tl.maximum(whole_end, whole), last)
    if DOCUMENTS:
        spans += b * s_b
        first, whole, whole_end, end = within_documents(spans, units, n0, first, whole, whole_end, end, BN, BM)
    of_keys = j
    if DROPOUT:
        of_keys = words_of_keys(words, j, keys)
    for r in range(GROUP):
        h = g * GROUP + r
        q_of, grad_of = q + b * q_b + h * q_h, grad + b * g_b + h * g_h
        row = (b * HEADS + h) * tokens
        mask_of, bias_of = mask + h * m_h, bias + h * b_h
        for m in range(first, whole, BM):
            dk_a, dk_r, grad_v = _keys_grad_block(dk_a, dk_r, grad_v, k_a, k_r, values, q_of, grad_of, mask_of, bias_of,
                                                  lse + row, top + row, delta + row, m, j, tokens, keys, left, right,
                                                  opened, scale, softcap, fill, documents, words, row, of_keys, least,
                                                  factor, q_t, g_t, m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS,
                                                  SOFTCAP, LEFT, RIGHT, DOCUMENTS, DROPOUT, True, PRECISION,
                                                  INTERPRETED, BM, BN)  # fmt: skip
        for m in range(whole, whole_end, BM):
            dk_a, dk_r, grad_v = _keys_grad_block(dk_a, dk_r, grad_v, k_a, k_r, values, q_of, grad_of, mask_of, bias_of,
                                                  lse + row, top + row, delta + row, m, j, tokens, keys, left, right,
                                                  opened, scale, softcap, fill, documents, words, row, of_keys, least,
                                                  factor, q_t, g_t, m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS,
                                                  SOFTCAP, LEFT, RIGHT, DOCUMENTS, DROPOUT, False, PRECISION,
                                                  INTERPRETED, BM, BN)  # fmt: skip
        for m in range(whole_end, end, BM):
            dk_a, dk_r, grad_v = _keys_grad_block(dk_a, dk_r, grad_v, k_a, k_r, values, q_of, grad_of, mask_of, bias_of,
                                                  lse + row, top + row, delta + row, m, j, tokens, keys, left, right,
                                                  opened, scale, softcap, fill, documents, words, row, of_keys, least,
                                                  factor, q_t, g_t, m_t, m_s, b_t, b_s, D, A, R, E, EP, MASK, BIAS,
                                                  SOFTCAP, LEFT, RIGHT, DOCUMENTS, DROPOUT, True, PRECISION,
                                                  INTERPRETED, BM, BN)  # fmt: skip
    if DROPOUT:
        grad_v *= factor
    a, e, there = tl.arange(0, A), tl.arange(0, EP), (j < keys)[:, None]
    at = dk + b * dk_b + g * dk_h + j[:, None] * dk_s
    tl.store(at + a[None, :], as_stored(dk_a * scale, dk), mask=there & (a < D)[None, :])
    if R:
        c = A + tl.arange(0, R)
        tl.store(at + c[None, :], as_stored(dk_r * scale, dk), mask=there & (c < D)[None, :])
    at = dv + b * dv_b + g * dv_h + j[:, None] * dv_s
    tl.store(at + e[None, :], as_stored(grad_v, dv), mask=there & (e < E)[None, :])


@triton.jit
def attention_bias_grad(grad, q, k, v, mask, bias, lse, top, delta, dbias, batches, tokens, keys, left, right, scale,
                        softcap, fill, documents, spans, words, least, factor, units, d_b, s_b, g_b, g_h, g_t, q_b, q_h,
                        q_t, k_b, k_h, k_s, v_b, v_h, v_s, m_b, m_h, m_t, m_s, b_b, b_h, b_t, b_s, prefix, p_b,
                        HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, A: tl.constexpr, R: tl.constexpr,
                        E: tl.constexpr, EP: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
                        LEFT: tl.constexpr, RIGHT: tl.constexpr, DOCUMENTS: tl.constexpr, PREFIX: tl.constexpr,
                        DROPOUT: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr, PRECISION: tl.constexpr,
                        INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The gradient of a bias [b or 1, h or 1, t, s]: a tile of scores' gradients, summed over batches and heads that
    share it."""
    scale, softcap, fill, factor = single(scale), single(softcap), single(fill), single(factor)
    n0, m0 = tl.program_id(0) * BN, tl.program_id(1) * BM
    i, j = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    own = tl.program_id(2)
    first_b, last_b, first_h, last_h = 0, batches, 0, HEADS
    if PER_HEAD:
        first_h = own % HEADS
        last_h = first_h + 1
        own = own // HEADS
    if PER_BATCH:
        first_b = own
        last_b = own + 1
    total = tl.zeros([BM, BN], tl.float32)
    visited = True
    if RIGHT:
        visited = n0 <= m0 + BM - 1 + right
    if PREFIX:
        visited = True
    if LEFT:
        visited = visited & (n0 + BN - 1 >= m0 - left)
    if visited:
        for number in range(first_b, last_b):
            b = tl.cast(number, tl.int64)
            for head in range(first_h, last_h):
                h = tl.cast(head, tl.int64)
                g = h // GROUP
                q_of, k_of, v_of = q + b * q_b + h * q_h, k + b * k_b + g * k_h, v + b * v_b + g * v_h
                q_a = tile(q_of, i, tl.arange(0, A), q_t, tokens, D, True, A > D)
                k_a = tile(k_of, j, tl.arange(0, A), k_s, keys, D, True, A > D)
                products = dot(q_a, tl.trans(k_a), tl.zeros([BM, BN], tl.float32), PRECISION, INTERPRETED)
                if R:
                    q_r = tile(q_of, i, A + tl.arange(0, R), q_t, tokens, D, True, A + R > D)
                    k_r = tile(k_of, j, A + tl.arange(0, R), k_s, keys, D, True, A + R > D)
                    products = dot(q_r, tl.trans(k_r), products, PRECISION, INTERPRETED)
                row = (b * HEADS + h) * tokens + i
                known = tl.load(lse + row, mask=i < tokens, other=0.0) * LOG2_E
                sums = tl.load(delta + row, mask=i < tokens, other=0.0)
                above = tl.load(top + row, mask=i < tokens, other=0.0)
                ids = documents + b * d_b
                opened = opened_keys(prefix, b, p_b, PREFIX)
                mask_of, bias_of = mask + b * m_b + h * m_h, bias + b * b_b + h * b_h
                p, slope, scores = weights_of(products, i[:, None], j[None, :], known[:, None], above[:, None], tokens,
                                              keys, left, right, opened, scale, softcap, mask_of, bias_of, m_t, m_s,
                                              b_t, b_s, fill, ids, MASK, 2, SOFTCAP, LEFT, RIGHT, DOCUMENTS,
                                              True)  # fmt: skip
                do = tile(grad + b * g_b + h * g_h, i, tl.arange(0, EP), g_t, tokens, E, True, EP > E)
                values = tile(v_of, j, tl.arange(0, EP), v_s, keys, E, True, EP > E)
                dp = dot(do, tl.trans(values), tl.zeros([BM, BN], tl.float32), PRECISION, INTERPRETED)
                if DROPOUT:
                    row_a, row_b = words_of_queries(words, keys, (b * HEADS + h) * tokens, i, tokens)
                    there = kept(row_a[:, None], row_b[:, None], words_of_keys(words, j, keys)[None, :], least)
                    dp = tl.where(there, dp * factor, 0.0)
                ds, _ = _score_gradient(p, dp, sums[:, None], slope, scores, i[:, None], j[None, :], tokens, keys,
                                        mask_of, m_t, m_s, MASK, SOFTCAP, True)  # fmt: skip
                total += ds
    at = tl.program_id(2).to(tl.int64) * tokens * keys + i[:, None].to(tl.int64) * keys + j[None, :]
    tl.store(dbias + at, as_stored(total, dbias), mask=(i < tokens)[:, None] & (j < keys)[None, :])
