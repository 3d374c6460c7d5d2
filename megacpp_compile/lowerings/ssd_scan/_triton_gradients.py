"""Triton kernels: gradients of the scores, of B and C, and of the steps."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.ssd_scan._triton_gemms import gemm
from megacpp_compile.lowerings.ssd_scan._triton_walk import where_equal


@triton.jit
def ssd_scores_grad(dy, x, B, C, decay, steps, cuts, d_scores, row_sums, column_sums, diagonal, d_skip,
                    tokens, heads, chunks, per_group, parts,
                    dy_b, dy_t, dy_h, x_b, x_t, x_h, B_b, B_t, B_g, C_b, C_t, C_g,
                    L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HB: tl.constexpr,
                    WIDE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """With scores C_r . B_s of a chunk: their gradient, summed over HB heads of a group.

    Per head, of (score * its gradient), s < r: sums over rows and, without dt, over columns, from which the gradients
    of the decay and of dt are made. `diagonal`: what s = r gives to the latter; nothing decays there, and where all
    else does, this would drown it. d_skip: sums of dy . x.
    """
    c, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    g = (part * HB // per_group).to(tl.int64)
    r, n, p = tl.arange(0, L), tl.arange(0, N)[None, :], tl.arange(0, P)[None, :]
    t = c.to(tl.int64) * L
    there = r[:, None] < tokens - t
    queries = tl.load(C + b * C_b + t * C_t + g * C_g + (r * C_t)[:, None] + n, mask=there, other=0)
    keys = tl.load(B + b * B_b + t * B_t + g * B_g + (r * B_t)[:, None] + n, mask=there, other=0)
    scores = gemm(queries, tl.trans(keys), WIDE)
    own = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
    scores = tl.where(r[:, None] > r[None, :], scores, 0)
    keep = r[:, None] >= r[None, :]
    if PACKED:
        cut = tl.load(cuts + (b * chunks + c) * L + r)
        keep = keep & (cut[:, None] == cut[None, :])
    total = tl.zeros([L, L], tl.float32)
    dy += b * dy_b + t * dy_t
    x += b * x_b + t * x_t
    for i in range(HB):
        h = (part * HB + i).to(tl.int64)
        row = (b * chunks + c) * heads + h
        grad = tl.load(dy + h * dy_h + (r * dy_t)[:, None] + p, mask=there, other=0)
        values = tl.load(x + h * x_h + (r * x_t)[:, None] + p, mask=there, other=0)
        straight = tl.sum(grad.to(tl.float32) * values.to(tl.float32), 1)
        tl.store(diagonal + row * L + r, straight * own)
        tl.store(d_skip + row, tl.sum(straight, 0))
        a, step = tl.load(decay + row * L + r), tl.load(steps + row * L + r)
        d = gemm(grad, tl.trans(values), WIDE)
        d *= tl.exp2(tl.where(keep, a[:, None] - a[None, :], float("-inf")))
        tl.store(column_sums + row * L + r, tl.sum(scores * d, 0))
        d *= step[None, :]
        tl.store(row_sums + row * L + r, tl.sum(scores * d, 1))
        total += d
    at = ((b * chunks + c) * parts + part) * L * L + r[:, None] * L + r[None, :]
    tl.store(d_scores + at, total)


@triton.jit
def ssd_group_grad(v, own, other, d_scores, decay, steps, cuts, states, entering, out, dots, inner,
                   tokens, heads, chunks, per_group, parts,
                   v_b, v_t, v_h, own_b, own_t, own_g, other_b, other_t, other_g, out_b, out_t, out_h,
                   L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HB: tl.constexpr, KEYS: tl.constexpr,
                   WIDE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Gradient of C (own = C, other = B, v = dy, states = those entering) or, with KEYS, of B (own = B, other = C,
    v = x, states = the gradients of those leaving), summed over HB heads of a group.

    Per head, `dots` is what the state's part of it gives to the gradient of the decay; of B's, without dt, also to that
    of dt. With KEYS, `inner` is the inner product of the entering state with the gradient of the leaving one.
    """
    c, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    g = (part * HB // per_group).to(tl.int64)
    r, n, p = tl.arange(0, L), tl.arange(0, N)[None, :], tl.arange(0, P)[None, :]
    t = c.to(tl.int64) * L
    there = r[:, None] < tokens - t
    v += b * v_b + t * v_t
    own += b * own_b + t * own_t + g * own_g
    other += b * other_b + t * other_t + g * other_g
    scores = tl.load(d_scores + ((b * chunks + c) * parts + part) * L * L + r[:, None] * L + r[None, :])
    others = tl.load(other + (r * other_t)[:, None] + n, mask=there, other=0)
    total = gemm(tl.trans(scores) if KEYS else scores, others, WIDE)
    mine = tl.load(own + (r * own_t)[:, None] + n, mask=there, other=0)
    at = tl.arange(0, P)[:, None] * N + n
    cut, cut_end = r, 0  # read where PACKED alone
    if PACKED:
        cut = tl.load(cuts + (b * chunks + c) * L + r)
        cut_end = tl.load(cuts + (b * chunks + c) * L + L - 1)
    for i in range(HB):
        h = (part * HB + i).to(tl.int64)
        row = (b * chunks + c) * heads + h
        a = tl.load(decay + row * L + r)
        state = tl.load(states + row * P * N + at)
        if KEYS:
            tl.store(inner + row, tl.sum(tl.sum(state * tl.load(entering + row * P * N + at), 1), 0))
            reach = tl.exp2(where_equal(tl.load(decay + row * L + L - 1) - a, cut, cut_end, PACKED))
        else:
            reach = tl.exp2(where_equal(a, cut, 0, PACKED))
        values = tl.load(v + h * v_h + (r * v_t)[:, None] + p, mask=there, other=0)
        grad = gemm(values, state, WIDE) * reach[:, None]
        tl.store(dots + row * L + r, tl.sum(grad * mine.to(tl.float32), 1))
        if KEYS:
            grad *= tl.load(steps + row * L + r)[:, None]
        total += grad
    out += b * out_b + t * out_t + part * out_h
    tl.store(out + (r * out_t)[:, None] + n, as_stored(total, out), mask=there)


@triton.jit
def ssd_steps_grad(row_sums, column_sums, across, diagonal, query_dots, key_dots, inner, decay, steps, cuts, A, d_dt,
                   d_A, tokens, heads, chunks, A_h,
                   L: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """Gradient of dt, and each chunk's part of A's. HALVES: row_sums and column_sums are of pairs within a half of the
    chunk, and `across` has what the second half's rows have besides, then the first's columns.

    What a token's own decay multiplies: every later row of its chunk, and the state that leaves it. So the gradient of
    the summed decay is summed again, from behind.
    """
    c, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    r = tl.arange(0, L)[:, None]
    h = tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    there = h < heads
    row = (b * chunks + c) * heads + h
    at = row * L + r
    step = tl.load(steps + at, mask=there, other=0)
    to_state = tl.load(key_dots + at, mask=there, other=0)
    column = to_state + tl.load(column_sums + at, mask=there, other=0)
    sums = tl.load(row_sums + at, mask=there, other=0)
    if HALVES:
        late = r >= L // 2
        sums += tl.load(across + at - L // 2, mask=there & late, other=0)
        column += tl.load(across + at + L // 2, mask=there & (r < L // 2), other=0)
    d = sums + tl.load(query_dots + at, mask=there, other=0) - step * column
    end = tl.exp2(tl.load(decay + row * L + L - 1, mask=there, other=0))
    if PACKED:
        cut = tl.load(cuts + (b * chunks + c) * L + r)
        before = tl.load(cuts + (b * chunks + c) * L + r - 1, mask=r > 0, other=0)
        end = tl.where(tl.load(cuts + (b * chunks + c) * L + L - 1) == 0, end, 0)
    leaving = tl.sum(step * to_state, 0)[None, :] + end * tl.load(inner + row, mask=there, other=0)
    d = tl.sum(d, 0)[None, :] - tl.cumsum(d, 0) + d + leaving
    if PACKED:
        d = tl.where(cut == before, d, 0)
    rate = tl.load(A + h * A_h, mask=there, other=0).to(tl.float32)
    t = (c * L + r).to(tl.int64)
    column += tl.load(diagonal + at, mask=there, other=0)
    tl.store(d_dt + (b * tokens + t) * heads + h, as_stored(column + rate * d, d_dt), mask=there & (t < tokens))
    tl.store(d_A + row, tl.sum(step * d, 0)[None, :], mask=there)


CHOICES = [{"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 2), (8, 2), (8, 3))]
scores_grad = Kernel(ssd_scores_grad, CHOICES, key=("heads", "L", "P", "N", "HB", "PACKED"))
group_grad = Kernel(ssd_group_grad, CHOICES, key=("heads", "L", "P", "N", "HB", "KEYS", "PACKED"), quick=True)
steps_grad = Kernel(ssd_steps_grad, [{"BH": 16, "num_warps": 4}], key=("heads", "L", "PACKED", "HALVES"), quick=True)
