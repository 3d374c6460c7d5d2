"""Triton kernels: the decay within chunks, and the state that enters each chunk (or the gradient of the one leaving)."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._triton_cast import as_stored
from megacpp_compile.lowerings._triton_launch import Kernel
from megacpp_compile.lowerings.ssd_scan._products import product

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def ssd_decay(dt, A, decay, steps, tokens, heads, chunks, dt_b, dt_t, dt_h, A_h,
              L: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """decay[b, c, h, l] = log2(e) * A_h * (dt summed over the chunk up to and with l); steps = dt, laid out the same.

    Behind the last token dt is 0: nothing decays and nothing comes in.
    """
    c, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    l = tl.arange(0, L)[:, None]
    h = tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    t = (c * L + l).to(tl.int64)
    there = h < heads
    step = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=(t < tokens) & there, other=0).to(tl.float32)
    rate = tl.load(A + h * A_h, mask=there, other=0).to(tl.float32) * LOG2_E
    out = ((b * chunks + c) * heads + h) * L + l
    tl.store(steps + out, step, mask=there)
    tl.store(decay + out, tl.cumsum(step * rate, 0), mask=there)


@triton.jit
def ssd_states(v, k, decay, steps, first, states, last, tokens, heads, chunks, per_group,
               v_b, v_t, v_h, k_b, k_t, k_g,
               L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
               REVERSE: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """states[c] = S, then S = decay over the chunk * S + sum over its tokens of weight * v (outer) k; last = S.

    Forward: v = x, k = B, and the weight is dt and the decay from the token to the chunk's end. REVERSE, chunks from
    the last to the first: v = the gradient of y, k = C, and the weight is the decay from the chunk's start.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = tile // (N // BN) * BP + tl.arange(0, BP)
    n = tile % (N // BN) * BN + tl.arange(0, BN)
    l = tl.arange(0, L)
    at = p[:, None] * N + n[None, :]
    v += b * v_b + h.to(tl.int64) * v_h + p[None, :]
    k += b * k_b + (h // per_group).to(tl.int64) * k_g + n[None, :]
    if FIRST:
        state = tl.load(first + (b * heads + h) * P * N + at).to(tl.float32)
    else:
        state = tl.zeros([BP, BN], tl.float32)
    for i in range(chunks):
        c = chunks - 1 - i if REVERSE else i
        row = (b * chunks + c) * heads + h
        tl.store(states + row * P * N + at, state)
        here = tl.load(decay + row * L + l)
        end = tl.load(decay + row * L + L - 1)
        if REVERSE:
            weight = tl.exp2(here)
        else:
            weight = tl.exp2(end - here) * tl.load(steps + row * L + l)
        t = (c * L + l).to(tl.int64)[:, None]
        values = tl.load(v + t * v_t, mask=t < tokens, other=0).to(tl.float32) * weight[:, None]
        keys = tl.load(k + t * k_t, mask=t < tokens, other=0)
        state = state * tl.exp2(end) + product(tl.trans(values), keys, WIDE)
    tl.store(last + (b * heads + h) * P * N + at, state)


@triton.jit
def ssd_rows(q, k, v, decay, steps, states, skip, out, tokens, heads, chunks, per_group, skip_h,
             q_b, q_t, q_g, k_b, k_t, k_g, v_b, v_t, v_h,
             L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, HB: tl.constexpr,
             REVERSE: tl.constexpr, SKIP: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """y of a chunk's rows, or the gradient of x: scores from within the chunk, and the state that reaches it.

    Forward: q = C, k = B, v = x, states = those entering. REVERSE: q = B, k = C, v = the gradient of y, states = the
    gradients of those leaving; scores run from later rows to earlier ones. A program takes HB heads of one group, whose
    products q @ k are the same.
    """
    tiles: tl.constexpr = L // BM
    c, m = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b = tl.program_id(2).to(tl.int64)
    g = (tl.program_id(1) * HB // per_group).to(tl.int64)
    r, s = m * BM + tl.arange(0, BM), tl.arange(0, L)
    n, p = tl.arange(0, N)[None, :], tl.arange(0, P)[None, :]
    t_r, t_s = (c * L + r).to(tl.int64)[:, None], (c * L + s).to(tl.int64)[:, None]
    queries = tl.load(q + b * q_b + t_r * q_t + g * q_g + n, mask=t_r < tokens, other=0)
    keys = tl.load(k + b * k_b + t_s * k_t + g * k_g + n, mask=t_s < tokens, other=0)
    scores = product(queries, tl.trans(keys), WIDE)
    keep = r[:, None] <= s[None, :] if REVERSE else r[:, None] >= s[None, :]
    at = tl.arange(0, P)[:, None] * N + n
    for i in range(HB):
        h = (tl.program_id(1) * HB + i).to(tl.int64)
        row = (b * chunks + c) * heads + h
        a_r, a_s = tl.load(decay + row * L + r), tl.load(decay + row * L + s)
        apart = a_s[None, :] - a_r[:, None] if REVERSE else a_r[:, None] - a_s[None, :]
        weighted = scores * tl.exp2(tl.where(keep, apart, float("-inf")))
        if REVERSE:
            reach = tl.exp2(tl.load(decay + row * L + L - 1) - a_r)
        else:
            reach = tl.exp2(a_r)
            weighted *= tl.load(steps + row * L + s)[None, :]
        state = tl.load(states + row * P * N + at)
        values = tl.load(v + b * v_b + t_s * v_t + h * v_h + p, mask=t_s < tokens, other=0)
        rows = product(queries, tl.trans(state), WIDE) * reach[:, None] + product(weighted, values, WIDE)
        if REVERSE:
            rows *= tl.load(steps + row * L + r)[:, None]
        if SKIP:
            own = tl.load(v + b * v_b + t_r * v_t + h * v_h + p, mask=t_r < tokens, other=0).to(tl.float32)
            rows += own * tl.load(skip + h * skip_h).to(tl.float32)
        where = ((b * tokens + t_r) * heads + h) * P + p
        tl.store(out + where, as_stored(rows, out), mask=t_r < tokens)


decay = Kernel(ssd_decay, [{"BH": 16, "num_warps": 4}], key=("heads", "L"))
states = Kernel(
    ssd_states,
    [{"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (2, 3)],
    key=("heads", "L", "P", "N"),
)
rows = Kernel(
    ssd_rows,
    [{"num_warps": warps, "num_stages": stages} for warps in (4, 8) for stages in (1, 2)],
    key=("heads", "L", "P", "N", "BM", "HB"),
)
