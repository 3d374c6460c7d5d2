"""`mla_decode` on Hopper in Gluon for few queries, up to N, 16 or 32, over rows of fewer bits: warps have roles.

Eight read rows and turn them into bfloat16, four score a tile of 64 and take its softmax, four have the sums. Between
them are barriers in shared memory. Scores are rows by queries and sums channels by queries, as in `_gluon_few`. Rows'
scales are left out of the rows: scores are multiplied by them, and probabilities.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megacpp_compile.lowerings._kernels.gluon_tiles import barrier, ring, seen_as, shared_tile, shared_tiles, unfenced
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.mla_decode._gluon_rows import (
    CODES,
    PLAIN,
    channel,
    decoded,
    log2,
    part,
    planes,
    queries,
    read,
    scale_of,
)


@gluon.jit
def _scales(row_scale, s_s, s_d, row, end, KIND: gl.constexpr):
    """Of the values' and of the other channels."""
    its_v = scale_of(row_scale, s_s, row, end)
    its_r = its_v
    if KIND == CODES:
        its_r = scale_of(row_scale + s_d, s_s, row, end)
    return its_v, its_r


@gluon.jit
def _softmax(q_v, q_r, k_v, k_r, p, keep, share, full, p_full, done, row_scale, s_s, s_d, part_lse, length, tokens,
             heads, splits, start, end, first_query, first_place, scale,
             KIND: gl.constexpr, N: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """Scores and softmax of all tiles: p [BK, N], times the rows' scales; what the sums before are to be multiplied by,
    and in the end what the results are."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    QUERY: gl.constexpr = gl.SliceLayout(0, M)
    ROW: gl.constexpr = gl.SliceLayout(1, M)
    zero = gl.full([BK, N], 0.0, gl.float32, M)
    most = gl.full([N], float("-inf"), gl.float32, QUERY)
    total = gl.full([BK, N], 0.0, gl.float32, M)
    m = first_query + gl.arange(0, N, QUERY)
    limit = gl.minimum(length - tokens + m // heads + 1, end)
    row = start + gl.arange(0, BK, ROW)
    its_v, its_r = _scales(row_scale, s_s, s_d, row, end, KIND)
    i = 0
    for first in range(start, end, BK):
        slot = i & 1
        phase = (i >> 1) & 1
        row = first + gl.arange(0, BK, ROW)
        of_v, of_r = its_v[:, None], its_r[:, None]
        its_v, its_r = _scales(row_scale, s_s, s_d, row + BK, end, KIND)
        mbarrier.wait(full.index(slot), phase)
        s = warpgroup_mma(k_v.index(slot), q_v.permute((1, 0)), zero, use_acc=False, is_async=True)
        if KIND == CODES:
            rest = warpgroup_mma(k_r.index(slot), q_r.permute((1, 0)), zero, use_acc=False, is_async=True)
            s, rest = warpgroup_mma_wait(0, deps=[s, rest])
            s = s * of_v + rest * of_r
        else:
            s = warpgroup_mma(k_r.index(slot), q_r.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            s = s * of_v
        s = gl.where(row[:, None] < limit[None, :], s * scale, float("-inf"))
        new = gl.maximum(most, gl.max(s, 0))
        base = gl.where(new == float("-inf"), 0.0, new)
        kept_share = gl.exp2(most - base)
        most = new
        weight = gl.exp2(s - base[None, :])
        total = total * kept_share[None, :] + weight
        p.index(slot).store((weight * of_v).to(p.dtype))
        keep.index(slot).store(kept_share)
        fence_async_shared()
        barrier()
        mbarrier.arrive(p_full.index(slot), count=1)
        i += 1
    total = gl.sum(total, 0)
    found = total > 0
    total = gl.where(found, total, 1.0)
    share.store(1.0 / total)
    barrier()
    mbarrier.arrive(done, count=1)
    place = (first_place + gl.arange(0, N, QUERY) * splits).to(gl.int64)
    gl.store(part_lse + place, gl.where(found, most + log2(total), float("-inf")), mask=m < tokens * heads)


@gluon.jit
def _sums(k_v, p, keep, share, full, empty, p_full, done, part_out, number, splits, start, end, first_query,
          first_place, V: gl.constexpr, KIND: gl.constexpr, N: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """The results [V, N]."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    QUERY: gl.constexpr = gl.SliceLayout(0, M)
    acc = gl.full([V, N], 0.0, gl.float32, M)
    i = 0
    for _ in range(start, end, BK):
        slot = i & 1
        phase = (i >> 1) & 1
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(p_full.index(slot), phase)
        acc = acc * keep.index(slot).load(QUERY)[None, :]
        acc = warpgroup_mma(k_v.index(slot).permute((1, 0)), p.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        i += 1
    mbarrier.wait(done, 0)
    acc = acc * share.load(QUERY)[None, :]
    n = gl.arange(0, N, QUERY)
    v = channel(gl.arange(0, V, gl.SliceLayout(1, M)), V // 2, KIND)
    at = (part_out + (first_place + n * splits).to(gl.int64) * V)[None, :] + v[:, None]
    gl.store(at, acc, mask=(first_query + n < number)[None, :] & (v >= 0)[:, None])


@gluon.jit
def _read_tile(kv, kv_s, first, end, V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr, KIND: gl.constexpr):
    PER: gl.constexpr = 8 if KIND == CODES else 4
    return (read(kv, kv_s, first, end, 0, V // PER, BK, KIND),
            read(kv, kv_s, first, end, V // PER, R // PER, BK, KIND))  # fmt: skip


@gluon.jit
def _bring(kv, kv_s, codebook, k_v, k_r, full, empty, start, end,
           V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr, KIND: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """All tiles, by way of registers: one is on its way while another waits for its place, decoded already if EARLY,
    which takes twice the registers. A place is free when its tile is in the sums, and so are that tile's probabilities
    and what they came with."""
    PER: gl.constexpr = 8 if KIND == CODES else 4
    OF_WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    book = planes(codebook, KIND)
    x_v, x_r = _read_tile(kv, kv_s, start, end, V, R, BK, KIND)
    i = 0
    for first in range(start, end, BK):
        slot = i & 1
        phase = (i >> 1) & 1
        if not EARLY:
            mbarrier.wait(empty.index(slot), phase ^ 1)
        y_v = decoded(x_v, book, BK, V // PER, KIND)
        y_r = decoded(x_r, book, BK, R // PER, KIND)
        if EARLY:
            x_v, x_r = _read_tile(kv, kv_s, first + BK, end, V, R, BK, KIND)
            mbarrier.wait(empty.index(slot), phase ^ 1)
        seen_as(k_v.index(slot), gl.int32, BK, V // 2, OF_WORDS).store(y_v)
        seen_as(k_r.index(slot), gl.int32, BK, R // 2, OF_WORDS).store(y_r)
        if not EARLY:
            x_v, x_r = _read_tile(kv, kv_s, first + BK, end, V, R, BK, KIND)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(slot), count=1)
        i += 1


@gluon.jit
def mla_decode_few_widened(q, kv, row_scale, codebook, lengths, part_out, part_lse, tokens, rows, heads, splits, scale,
                           q_b, q_t, q_h, kv_b, kv_s, s_b, s_s, s_d, l_b,
                           V: gl.constexpr, R: gl.constexpr, KIND: gl.constexpr, N: gl.constexpr, BK: gl.constexpr,
                           SOFTMAX_REGISTERS: gl.constexpr, SUM_REGISTERS: gl.constexpr,
                           EARLY: gl.constexpr):  # fmt: skip
    """A part of a sequence's rows, and N of its queries. Launched with eight warps, which become those that read."""
    gl.static_assert(KIND != PLAIN and gl.num_warps() == 8)
    T: gl.constexpr = q.dtype.element_ty
    batch = gl.program_id(2).to(gl.int64)
    length, start, end = part(lengths, batch, rows, splits, l_b, BK)
    kv += batch * kv_b
    row_scale += batch * s_b
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_v = shared_tiles(T, 2, BK, V)
    k_r = shared_tiles(T, 2, BK, R)
    q_v = shared_tile(T, N, V)
    q_r = shared_tile(T, N, R)
    p = shared_tiles(T, 2, BK, N)
    keep = gl.allocate_shared_memory(gl.float32, [2, N], FLAT)
    share = gl.allocate_shared_memory(gl.float32, [N], FLAT)
    full, empty = ring(2)
    p_full, done = unfenced(2), unfenced(1).index(0)
    first_query = gl.program_id(0) * N
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    m = first_query + gl.arange(0, N, gl.SliceLayout(1, L))
    mine = m < tokens * heads
    at = q + batch * q_b + (m // heads).to(gl.int64) * q_t + (m % heads) * q_h
    queries(at, mine, q_v, 0, V, V // 2, KIND, L)
    queries(at + V, mine, q_r, 0, R, R // 2, KIND, L)
    fence_async_shared()
    barrier()
    first_place = (batch * tokens * heads + first_query) * splits + gl.program_id(1)
    scale = scale * LOG2_E
    gl.warp_specialize([
        (_bring, (kv, kv_s, codebook, k_v, k_r, full, empty, start, end, V, R, BK, KIND, EARLY)),
        (_softmax, (q_v, q_r, k_v, k_r, p, keep, share, full, p_full, done, row_scale, s_s, s_d, part_lse, length,
                    tokens, heads, splits, start, end, first_query, first_place, scale, KIND, N, BK)),
        (_sums, (k_v, p, keep, share, full, empty, p_full, done, part_out, tokens * heads, splits, start, end,
                 first_query, first_place, V, KIND, N, BK)),
    ], [4, 4], [SOFTMAX_REGISTERS, SUM_REGISTERS])  # fmt: skip
