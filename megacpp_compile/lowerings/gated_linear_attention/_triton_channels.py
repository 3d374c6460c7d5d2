"""Triton kernels: linear attention's chunks in which some channel decays by much, gates a channel.

The decay between two tokens is made of two factors at a cut that parts them, neither of which grows, as the delta
rule's (`gated_delta_rule._triton_channels`); of chunks that decay little gates are factors of queries and keys
(`_triton_small_decay`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.gated_delta_rule._triton_backward_tiles import (
    as_multiplied,
    chunk_tokens,
    from_behind,
    product,
)
from megacpp_compile.lowerings.gated_delta_rule._triton_channels import load_rows, to_cut
from megacpp_compile.lowerings.gated_delta_rule._triton_large_decay import nth_chunk, share
from megacpp_compile.lowerings.gated_delta_rule._triton_tiles import sums
from megacpp_compile.lowerings.gated_linear_attention._triton_walk import in_powers

# Channels that a program takes at once: their tiles fit into registers.
AT_ONCE = 64


@triton.jit
def parted_by(r, log):
    """[t, i]: whether a cut in the middle of 2 << log rows parts two rows, i the first of them."""
    return (((r[:, None] ^ r[None, :]) >> log) == 1) & (r[:, None] > r[None, :])


@triton.jit
def gla_rows(q, k, g, table, queries, keys, ends, scores, large_decay, tokens, chunks, heads, per_key,
             q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
             CUTS: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """queries = q exp(G), keys = k exp(G_C - G), both [b, t, h, K]; ends [b, c, h, 3, K] = G_C in powers of 2, and
    twice 0; scores [b, c, h, C, C] = P. CUTS: log2(C). SKIP: leaves out chunks of small decay."""
    start, stop, stride = share(large_decay, SKIP)
    for i in tl.range(start, stop, stride, disable_licm=True):
        c, h, b = nth_chunk(large_decay, i, chunks, heads, SKIP)
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        r = tl.arange(0, C)
        there = r < length
        row = (b * chunks + c) * heads + h
        out = ((b * tokens + first) * heads + h) * K
        made = tl.zeros([C, C], tl.float32)
        for part in range(K // BK):
            n = part * BK + tl.arange(0, BK)
            query = load_rows(q + b * q_b + h // per_key * q_h + first * q_t, q_t, n, there).to(tl.float32)
            key = load_rows(k + b * k_b + h // per_key * k_h + first * k_t, k_t, n, there).to(tl.float32)
            gates = in_powers(load_rows(g + b * g_b + h * g_h + first * g_t, g_t, n, there))
            at = out + r[:, None] * (heads * K) + n[None, :]
            into = tl.exp2(sums(r[:, None] >= r[None, :], gates, WIDE))
            tl.store(queries + at, as_stored(query * into, queries), mask=there[:, None])
            left = tl.exp2(sums(r[:, None] < r[None, :], gates, WIDE))
            tl.store(keys + at, as_stored(key * left, keys), mask=there[:, None])
            tl.store(ends + row * 3 * K + n, tl.sum(gates, 0))
            tl.store(ends + row * 3 * K + K + n, tl.zeros([BK], tl.float32))
            tl.store(ends + row * 3 * K + 2 * K + n, tl.zeros([BK], tl.float32))
            made += tl.where(r[:, None] == r[None, :], tl.sum(query * key, 1)[:, None], 0)
            for log in range(CUTS):
                factor = tl.exp2(sums(to_cut(r, r, log), gates, WIDE))
                made += tl.where(parted_by(r, log), product(query * factor, tl.trans(key * factor), WIDE), 0)
        tl.store(scores + row * C * C + (r[:, None] * C + r[None, :]), as_stored(made, scores))


@triton.jit
def gla_rows_gradient(q, k, g, table, d_scores, d_queries, d_keys, d_end, dq, dk, dg, large_decay,
                      tokens, chunks, heads, per_key, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
                      C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CUTS: tl.constexpr, SKIP: tl.constexpr,
                      PACKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """What a value head gives to dq and dk [b, t, h, K], and dg, from the gradients of what `gla_rows` writes, in
    float32 [b, c, h, C, K], of P, and of the logarithm of the chunk's whole decay, before that, [b, c, h, K]."""
    start, stop, stride = share(large_decay, SKIP)
    for i in tl.range(start, stop, stride, disable_licm=True):
        c, h, b = nth_chunk(large_decay, i, chunks, heads, SKIP)
        first, length = chunk_tokens(table, c, tokens, C, PACKED)
        r = tl.arange(0, C)
        there = r < length
        row = (b * chunks + c) * heads + h
        square = row * C * C + (r[:, None] * C + r[None, :])
        same = tl.load(d_scores + row * C * C + r * (C + 1)).to(tl.float32)[:, None]
        for part in range(K // BK):
            n = part * BK + tl.arange(0, BK)
            query = load_rows(q + b * q_b + h // per_key * q_h + first * q_t, q_t, n, there).to(tl.float32)
            key = load_rows(k + b * k_b + h // per_key * k_h + first * k_t, k_t, n, there).to(tl.float32)
            gates = in_powers(load_rows(g + b * g_b + h * g_h + first * g_t, g_t, n, there))
            at = row * C * K + (r[:, None] * K + n[None, :])
            d_query, d_key = tl.load(d_queries + at), tl.load(d_keys + at)
            into = tl.exp2(sums(r[:, None] >= r[None, :], gates, WIDE))
            gate = as_multiplied(query * into, WIDE) * d_query
            d_query = d_query * into + same * key
            left = tl.exp2(sums(r[:, None] < r[None, :], gates, WIDE))
            leaving = as_multiplied(key * left, WIDE) * d_key
            d_key = d_key * left + same * query
            for log in range(CUTS):
                factor = tl.exp2(sums(to_cut(r, r, log), gates, WIDE))
                moved = tl.load(d_scores + square, mask=parted_by(r, log), other=0)
                read, own = product(moved, key * factor, WIDE), product(tl.trans(moved), query * factor, WIDE)
                gate += as_multiplied(query * factor, WIDE) * read - as_multiplied(key * factor, WIDE) * own
                d_query += read * factor
                d_key += own * factor
            end = tl.load(d_end + row * K + n) * tl.exp2(tl.sum(gates, 0))
            gate = from_behind(gate) + tl.cumsum(leaving, 0) - leaving + end[None, :]
            at = ((b * tokens + first) * heads + h) * K + (r[:, None] * (heads * K) + n[None, :])
            tl.store(dq + at, as_stored(d_query, dq), mask=there[:, None])
            tl.store(dk + at, as_stored(d_key, dk), mask=there[:, None])
            tl.store(dg + at, as_stored(gate, dg), mask=there[:, None])


CHOICES = [{"num_warps": warps, "num_stages": 1} for warps in (4, 8)]
rows = Kernel(gla_rows, CHOICES, key=("heads", "C", "K"))
rows_gradient = Kernel(gla_rows_gradient, CHOICES, key=("heads", "C", "K"))
