"""`mla_decode` on Hopper in Gluon for many queries: a program has 64 of a sequence's, and its warps have roles.

Four warps score a tile of 64 rows and take its softmax; eight have the sums, 64 queries by all value channels, and
multiply probabilities and values of the tile before; four more bring rows. A tile has two halves of its channels, each
with barriers of its own: the next but one begins to arrive while the second half is still multiplied, and is scored
while its own second half arrives.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megacpp_compile.lowerings._kernels.gluon_tiles import (
    barrier,
    load_async,
    ring,
    seen_as,
    shared_tile,
    shared_tiles,
    unfenced,
)
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.mla_decode._gluon_rows import (
    CODES,
    FP8,
    PLAIN,
    channel,
    decoded,
    log2,
    part,
    planes,
    queries,
    read,
    scale_of,
    scaled,
)

# By the name it has in Triton 3.9, and by that of 3.6.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _softmax(q_a, q_b, q_r, k_a, k_b, k_r, keep, share, full_a, full_b, p_full, done, row_scale, s_s,
             part_lse, length, tokens, heads, splits, start, end, first_query, first_place, scale,
             KIND: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """Scores and softmax of all tiles, by one warp group: p [BH, BK], times the rows' scales, where the last channels
    of the tile were; what the sums before are to be multiplied by, and in the end what the results are."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    QUERY: gl.constexpr = gl.SliceLayout(1, M)
    ROW: gl.constexpr = gl.SliceLayout(0, M)
    zero = gl.full([BH, BK], 0.0, gl.float32, M)
    most = gl.full([BH], float("-inf"), gl.float32, QUERY)
    total = gl.full([BH], 0.0, gl.float32, QUERY)
    m = first_query + gl.arange(0, BH, QUERY)
    limit = gl.minimum(length - tokens + m // heads + 1, end)
    whole = gl.minimum(length - tokens + 1, end)  # up to where every query sees every row
    i = 0
    for first in range(start, end, BK):
        slot = i & 1
        phase = (i >> 1) & 1
        row = first + gl.arange(0, BK, ROW)
        if KIND != PLAIN:
            its_v = scale_of(row_scale, s_s, row, end)
        mbarrier.wait(full_a.index(slot), phase)
        s = warpgroup_mma(q_a, k_a.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full_b.index(slot), phase)
        s = warpgroup_mma(q_b, k_b.index(slot).permute((1, 0)), s, is_async=True)
        if KIND == CODES:  # whose other channels are their row's scale times what their codes stand for
            s = warpgroup_mma_wait(0, deps=[s])
            s = s * its_v[None, :]
        s = warpgroup_mma(q_r, k_r.index(slot).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if KIND == FP8:
            s = s * its_v[None, :]
        s = s * scale
        if first + BK > whole:
            s = gl.where(row[None, :] < limit[:, None], s, float("-inf"))
        new = gl.maximum(most, gl.max(s, 1))
        base = gl.where(new == float("-inf"), 0.0, new)
        kept_share = gl.exp2(most - base)
        most = new
        weight = gl.exp2(s - base[:, None])
        total = total * kept_share + gl.sum(weight, 1)
        if KIND != PLAIN:
            weight = weight * its_v[None, :]
        k_r.index(slot).store(weight.to(k_r.dtype))
        keep.index(slot).store(kept_share)
        fence_async_shared()
        barrier()
        mbarrier.arrive(p_full.index(slot), count=1)
        i += 1
    found = total > 0
    total = gl.where(found, total, 1.0)
    share.store(1.0 / total)
    barrier()
    mbarrier.arrive(done, count=1)
    place = (first_place + gl.arange(0, BH, QUERY) * splits).to(gl.int64)
    gl.store(part_lse + place, gl.where(found, most + log2(total), float("-inf")), mask=m < tokens * heads)


@gluon.jit
def _store(part_out, acc, first_query, first_place, number, splits, lanes_from: gl.constexpr, V: gl.constexpr,
           BH: gl.constexpr, KIND: gl.constexpr, M: gl.constexpr):  # fmt: skip
    row = gl.arange(0, BH, gl.SliceLayout(1, M))
    v = channel(lanes_from + gl.arange(0, V // 2, gl.SliceLayout(0, M)), V // 2, KIND)
    place = (first_place + row * splits).to(gl.int64)
    there = (first_query + row < number)[:, None] & (v >= 0)[None, :]
    gl.store((part_out + place * V)[:, None] + v[None, :], acc, mask=there)


@gluon.jit
def _sums(k_a, k_b, k_r, keep, share, full_a, full_b, empty_a, empty_b, p_full, done, part_out,
          number, splits, start, end, first_query, first_place,
          V: gl.constexpr, KIND: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """The results [BH, V], by two warp groups, each with half of the channels of either half of a tile."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, V // 4, 16])
    QUERY: gl.constexpr = gl.SliceLayout(1, M)
    a = gl.full([BH, V // 2], 0.0, gl.float32, M)
    b = gl.full([BH, V // 2], 0.0, gl.float32, M)
    i = 0
    for _ in range(start, end, BK):
        slot = i & 1
        phase = (i >> 1) & 1
        mbarrier.wait(full_a.index(slot), phase)
        mbarrier.wait(full_b.index(slot), phase)
        mbarrier.wait(p_full.index(slot), phase)
        kept_share = keep.index(slot).load(QUERY)[:, None]
        a = a * kept_share
        b = b * kept_share
        a = warpgroup_mma(k_r.index(slot), k_a.index(slot), a, is_async=True)
        b = warpgroup_mma(k_r.index(slot), k_b.index(slot), b, is_async=True)
        a = warpgroup_mma_wait(1, deps=[a])
        barrier()
        mbarrier.arrive(empty_a.index(slot), count=1)
        b = warpgroup_mma_wait(0, deps=[b])
        barrier()
        mbarrier.arrive(empty_b.index(slot), count=1)
        i += 1
    mbarrier.wait(done, 0)
    total = share.load(QUERY)[:, None]
    _store(part_out, a * total, first_query, first_place, number, splits, 0, V, BH, KIND, M)
    _store(part_out, b * total, first_query, first_place, number, splits, V // 2, V, BH, KIND, M)


@gluon.jit
def _copy(kv, kv_s, first, end, lane_from, to, LANES: gl.constexpr, BK: gl.constexpr):
    ACROSS: gl.constexpr = min(32, LANES // 8)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    row = first + gl.arange(0, BK, gl.SliceLayout(1, L))
    lane = lane_from + gl.arange(0, LANES, gl.SliceLayout(0, L))
    at = (kv + row.to(gl.int64) * kv_s)[:, None] + lane[None, :]
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
    load_async(to, at, mask=(row < end)[:, None] & (lane >= 0)[None, :])


@gluon.jit
def _bring(halves, rests, kv, kv_s, k_a, k_b, k_r, full_a, full_b, empty_a, empty_b, batch, start, end,
           V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """All tiles, one after the other, by a warp that does nothing else. The last one may have rows that nobody may see,
    which are copied as zeros, by threads."""
    i = 0
    for first in range(start, end - BK + 1, BK):
        slot = i & 1
        phase = (i >> 1) & 1
        mbarrier.wait(empty_a.index(slot), phase ^ 1)
        mbarrier.expect(full_a.index(slot), BK * V)
        _tma_load(halves, [batch, first, 0], full_a.index(slot), k_a.index(slot).reshape([1, BK, V // 2]))
        mbarrier.wait(empty_b.index(slot), phase ^ 1)
        mbarrier.expect(full_b.index(slot), BK * (V + 2 * R))
        _tma_load(rests, [batch, first, V], full_b.index(slot), k_r.index(slot).reshape([1, BK, R]))
        _tma_load(halves, [batch, first, V // 2], full_b.index(slot), k_b.index(slot).reshape([1, BK, V // 2]))
        i += 1
    first = start + i * BK
    if first < end:
        slot = i & 1
        phase = (i >> 1) & 1
        mbarrier.wait(empty_a.index(slot), phase ^ 1)
        mbarrier.wait(empty_b.index(slot), phase ^ 1)
        _copy(kv, kv_s, first, end, 0, k_a.index(slot), V // 2, BK)
        _copy(kv, kv_s, first, end, V // 2, k_b.index(slot), V // 2, BK)
        _copy(kv, kv_s, first, end, V, k_r.index(slot), R, BK)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full_a.index(slot), count=1)
        mbarrier.arrive(full_b.index(slot), count=1)


@gluon.jit
def _widen(x, book, to, LANES: gl.constexpr, BK: gl.constexpr, KIND: gl.constexpr):
    WORDS: gl.constexpr = LANES // (8 if KIND == CODES else 4)
    seen_as(to, gl.int32, BK, LANES // 2, gl.NVMMASharedLayout(128, 32)).store(decoded(x, book, BK, WORDS, KIND))


@gluon.jit
def _bring_widened(kv, kv_s, row_scale, s_s, s_d, codebook, k_a, k_b, k_r, full_a, full_b, empty_a, empty_b, start, end,
                   V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr, KIND: gl.constexpr):  # fmt: skip
    """All tiles, by way of registers: read while the half before is turned into bfloat16."""
    PER: gl.constexpr = 8 if KIND == CODES else 4
    HALF: gl.constexpr = V // 2 // PER
    book = planes(codebook, KIND)
    x_a = read(kv, kv_s, start, end, 0, HALF, BK, KIND)
    i = 0
    for first in range(start, end, BK):
        slot = i & 1
        phase = (i >> 1) & 1
        x_b = read(kv, kv_s, first, end, HALF, HALF, BK, KIND)
        x_r = read(kv, kv_s, first, end, 2 * HALF, R // PER, BK, KIND)
        mbarrier.wait(empty_a.index(slot), phase ^ 1)
        _widen(x_a, book, k_a.index(slot), V // 2, BK, KIND)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full_a.index(slot), count=1)
        x_a = read(kv, kv_s, first + BK, end, 0, HALF, BK, KIND)
        mbarrier.wait(empty_b.index(slot), phase ^ 1)
        _widen(x_b, book, k_b.index(slot), V // 2, BK, KIND)
        if KIND == CODES:
            y = decoded(x_r, book, BK, R // PER, KIND)
            to_r = seen_as(k_r.index(slot), gl.int32, BK, R // 2, gl.NVMMASharedLayout(128, 32))
            row = first + gl.arange(0, BK, gl.SliceLayout(1, y.type.layout))
            to_r.store(scaled(y, scale_of(row_scale + s_d, s_s, row, end)))
        else:
            _widen(x_r, book, k_r.index(slot), R, BK, KIND)
        fence_async_shared()
        barrier()
        mbarrier.arrive(full_b.index(slot), count=1)
        i += 1


@gluon.jit
def mla_decode_many(halves, rests, q, kv, row_scale, codebook, lengths, part_out, part_lse, tokens, rows, heads, splits,
                    scale, q_b, q_t, q_h, kv_b, kv_s, s_b, s_s, s_d, l_b,
                    V: gl.constexpr, R: gl.constexpr, KIND: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr,
                    SOFTMAX_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
                    COPY_WARPS: gl.constexpr):  # fmt: skip
    """BH queries and a part of their sequence's rows. Launched with eight warps, which become those of the sums. PLAIN
    rows are `halves` and `rests`, too, descriptors of all rows for tiles of half of the values' channels, and of the
    others."""
    gl.static_assert(R == BK and BH == BK)  # probabilities take the place of a tile's last channels
    T: gl.constexpr = q.dtype.element_ty
    batch = gl.program_id(2).to(gl.int64)
    length, start, end = part(lengths, batch, rows, splits, l_b, BK)
    kv += batch * kv_b
    row_scale += batch * s_b
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_a = shared_tiles(T, 2, BK, V // 2)
    k_b = shared_tiles(T, 2, BK, V // 2)
    k_r = shared_tiles(T, 2, BK, R)
    q_a = shared_tile(T, BH, V // 2)
    q_b_ = shared_tile(T, BH, V // 2)
    q_r = shared_tile(T, BH, R)
    keep = gl.allocate_shared_memory(gl.float32, [2, BH], FLAT)
    share = gl.allocate_shared_memory(gl.float32, [BH], FLAT)
    full_a, empty_a = ring(2)
    full_b, empty_b = ring(2)
    p_full, done = unfenced(2), unfenced(1).index(0)

    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    first_query = gl.program_id(0) * BH
    m = first_query + gl.arange(0, BH, gl.SliceLayout(1, L))
    mine = m < tokens * heads
    at = q + batch * q_b + (m // heads).to(gl.int64) * q_t + (m % heads) * q_h
    queries(at, mine, q_a, 0, V // 2, V // 2, KIND, L)
    queries(at, mine, q_b_, V // 2, V // 2, V // 2, KIND, L)
    queries(at + V, mine, q_r, 0, R, R // 2, KIND, L)
    fence_async_shared()
    barrier()
    first_place = (batch * tokens * heads + first_query) * splits + gl.program_id(1)
    scale = scale * LOG2_E
    if KIND == PLAIN:
        gl.warp_specialize([
            (_sums, (k_a, k_b, k_r, keep, share, full_a, full_b, empty_a, empty_b, p_full, done, part_out,
                     tokens * heads, splits, start, end, first_query, first_place, V, KIND, BH, BK)),
            (_softmax, (q_a, q_b_, q_r, k_a, k_b, k_r, keep, share, full_a, full_b, p_full, done, row_scale,
                        s_s, part_lse, length, tokens, heads, splits, start, end, first_query, first_place, scale,
                        KIND, BH, BK)),
            (_bring, (halves, rests, kv, kv_s, k_a, k_b, k_r, full_a, full_b, empty_a, empty_b, gl.program_id(2), start,
                      end, V, R, BK)),
        ], [4, COPY_WARPS], [SOFTMAX_REGISTERS, COPY_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_sums, (k_a, k_b, k_r, keep, share, full_a, full_b, empty_a, empty_b, p_full, done, part_out,
                     tokens * heads, splits, start, end, first_query, first_place, V, KIND, BH, BK)),
            (_softmax, (q_a, q_b_, q_r, k_a, k_b, k_r, keep, share, full_a, full_b, p_full, done, row_scale,
                        s_s, part_lse, length, tokens, heads, splits, start, end, first_query, first_place, scale,
                        KIND, BH, BK)),
            (_bring_widened, (kv, kv_s, row_scale, s_s, s_d, codebook, k_a, k_b, k_r, full_a, full_b, empty_a, empty_b,
                              start, end, V, R, BK, KIND)),
        ], [4, COPY_WARPS], [SOFTMAX_REGISTERS, COPY_REGISTERS])  # fmt: skip
