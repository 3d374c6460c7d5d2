"""Triton kernels: the decay within chunks, and the walk over all chunks of a head that carries its state along."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.ssd_scan._triton_gemms import gemm


@triton.jit
def ssd_decay(dt, A, decay, steps, tokens, heads, chunks, dt_b, dt_t, dt_h, A_h,
              L: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """decay[b, c, h, r] = log2(e) * A_h * (dt summed over the chunk up to and with r); steps = dt, laid out the same.

    Behind the last token dt is 0: nothing decays and nothing comes in.
    """
    c, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    r = tl.arange(0, L)[:, None]
    h = tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    t = (c * L + r).to(tl.int64)
    there = h < heads
    step = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=(t < tokens) & there, other=0).to(tl.float32)
    rate = tl.load(A + h * A_h, mask=there, other=0).to(tl.float32) * LOG2_E
    out = ((b * chunks + c) * heads + h) * L + r
    tl.store(steps + out, step, mask=there)
    tl.store(decay + out, tl.cumsum(step * rate, 0), mask=there)


@triton.jit
def ssd_cuts(seq_idx, cuts, tokens, chunks, seq_b, seq_t, L: tl.constexpr):  # fmt: skip
    """cuts[b, c, r] = how many documents begin in the chunk up to and with r: at tokens, but the first, whose number is
    another than the one before."""
    c, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    r = tl.arange(0, L)
    t = (c * L + r).to(tl.int64)
    behind = (t > 0) & (t < tokens)
    seq_idx += b * seq_b
    own = tl.load(seq_idx + t * seq_t, mask=behind, other=0)
    before = tl.load(seq_idx + (t - 1) * seq_t, mask=behind, other=0)
    tl.store(cuts + (b * chunks + c) * L + r, tl.cumsum((own != before).to(tl.int32), 0))


@triton.jit
def where_equal(exponent, cut, other, PACKED: tl.constexpr):
    """The logarithm of a decay, or that of none where another document has begun in between."""
    return tl.where(cut == other, exponent, float("-inf")) if PACKED else exponent


@triton.jit
def ssd_walk(q, k, v, decay, steps, cuts, skip, first, out, states, last,
             tokens, heads, chunks, per_group, every, kept, skip_h,
             q_b, q_t, q_g, k_b, k_t, k_g, v_b, v_t, v_h,
             L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, REVERSE: tl.constexpr,
             SKIP: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
             PACKED: tl.constexpr):  # fmt: skip
    """A head's chunks one after the other, BP of its P channels, the state [N, BP] in registers: with N before the
    channels its GEMMs have N rows, of which tensor cores take 64 at once.

    Forward: q = C, k = B, v = x; out = y, from the scores within the chunk and the state that enters it; then
    state = decay over the chunk * state + sum over its tokens of dt * decay to its end * x (outer) B.
    REVERSE, the last chunk first: q = B, k = C, v = the gradient of y; the state is the gradient of the one that leaves
    the chunk, and out the gradient of x.
    `every` chunks are one of those whose states are kept: entering it, or in REVERSE leaving it. ROWS: write out.
    PACKED: by `cuts` nothing decays into another document; else that is None.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r = tl.arange(0, L)
    n, p = tl.arange(0, N), tile * BP + tl.arange(0, BP)
    q += b * q_b + h // per_group * q_g + n[None, :]
    k += b * k_b + h // per_group * k_g + n[None, :]
    v += b * v_b + h * v_h + p[None, :]
    at = p[None, :] * N + n[:, None]
    state = tl.zeros([N, BP], tl.float32)
    if FIRST:
        state += tl.load(first + (b * heads + h) * P * N + at).to(tl.float32)
    keep = r[:, None] <= r[None, :] if REVERSE else r[:, None] >= r[None, :]
    if SKIP:
        own = tl.load(skip + h * skip_h).to(tl.float32)
    for i in range(chunks):
        c = chunks - 1 - i if REVERSE else i
        t = (c * L + r).to(tl.int64)[:, None]
        there = t < tokens
        row = ((b * chunks + c) * heads + h) * L
        end = tl.load(decay + row + L - 1)
        a, step = tl.load(decay + row + r), tl.load(steps + row + r)
        cut, cut_end = r, 0  # read where PACKED alone
        if PACKED:
            cut = tl.load(cuts + (b * chunks + c) * L + r)
            cut_end = tl.load(cuts + (b * chunks + c) * L + L - 1)
        keys = tl.load(k + t * k_t, mask=there, other=0)
        values = tl.load(v + t * v_t, mask=there, other=0)
        # REVERSE: how far the chunk is from being the last of those that make one, or of all.
        behind = tl.minimum(every - 1 - c % every, i) if REVERSE else c % every
        if behind == 0:
            tl.store(states + ((b * kept + c // every) * heads + h) * P * N + at, state)
        if ROWS:
            queries = tl.load(q + t * q_t, mask=there, other=0)
            apart = a[None, :] - a[:, None] if REVERSE else a[:, None] - a[None, :]
            if PACKED:
                apart = where_equal(apart, cut[:, None], cut[None, :], PACKED)
            weighted = gemm(queries, tl.trans(keys), WIDE) * tl.exp2(tl.where(keep, apart, float("-inf")))
            rows = gemm(queries, state, WIDE)
            if REVERSE:
                reach = tl.exp2(where_equal(end - a, cut, cut_end, PACKED))
                rows = (rows * reach[:, None] + gemm(weighted, values, WIDE)) * step[:, None]
            else:
                reach = tl.exp2(where_equal(a, cut, 0, PACKED))
                rows = rows * reach[:, None] + gemm(weighted * step[None, :], values, WIDE)
            if SKIP:
                rows += values.to(tl.float32) * own
            tl.store(out + ((b * tokens + t) * heads + h) * P + p[None, :], as_stored(rows, out), mask=there)
        if REVERSE:
            weight = tl.exp2(where_equal(a, cut, 0, PACKED))
        else:
            weight = tl.exp2(where_equal(end - a, cut, cut_end, PACKED)) * step
        added = gemm(tl.trans(keys), values.to(tl.float32) * weight[:, None], WIDE)
        state = state * tl.exp2(where_equal(end, cut_end, 0, PACKED)) + added
    tl.store(last + (b * heads + h) * P * N + at, state)


decay = Kernel(ssd_decay, [{"BH": 16, "num_warps": 4}], key=("heads", "L"), quick=True)
cuts = Kernel(ssd_cuts, [{"num_warps": 1}], key=("L",))
# One stage is not among them: with it and fewer channels than a head has, Triton 3.6 reads beyond shared memory.
walk = Kernel(
    ssd_walk,
    [{"num_warps": warps, "num_stages": 2} for warps in (4, 8)],
    key=("heads", "L", "P", "N", "BP", "REVERSE", "ROWS", "PACKED"),
)
