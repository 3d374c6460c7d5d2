"""The backward of `sparse_mla` for Hopper, in Gluon: a program has 64 heads of a query and goes over its rows twice.

First rows are copied in tiles of 64 by four warps; four score a tile and multiply it by the output's gradients, in one
GEMM, which gives probabilities and the scores' gradients; eight sum up q's gradient. There are no registers left for
the gradients of rows, so probabilities and scores' gradients are kept in memory that is the program's own, half a
megabyte at 2048 rows. Then (`_gluon_rows_grad.py`) they are brought back, and those eight have the rows' gradients.

A program takes one query after the other, as there is one to a multiprocessor: while some add to memory, others
multiply.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megacpp_compile.lowerings._kernels.gluon_tiles import barrier, load_async
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.sparse_mla._gluon_rows import _copy, kept, named, tiles_of
from megacpp_compile.lowerings.sparse_mla._gluon_rows_grad import (
    PAIRS,
    bring_back,
    keep,
    landing,
    rest_gradient,
    tiles_in,
    values_gradient,
)


@gluon.jit
def _bring(kv, indices, weights, numbers, k_a, k_b, k_r, full, empty, stored, pair_full, pair_empty, tiles, done, work,
           rows, last, topk, kv_s, i_k,
           V: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """All tiles of rows, each in three parts, which come as soon as their place is free; then what was kept of them."""
    HALF: gl.constexpr = V // 2
    index = named(indices, 0, topk, i_k, BK)
    for i in range(tiles):
        number = kept(index, i, rows, last, topk, CAUSAL, BK)
        index = named(indices, i + 1, topk, i_k, BK)
        here = numbers.index(i & 1)
        here.store(number)
        barrier()
        phase = (done + i + 1) & 1
        mbarrier.wait(empty.index(0), phase)
        _copy(kv, here, kv_s, 0, k_a, HALF, 8, BK)
        landing(full.index(0))
        mbarrier.wait(empty.index(1), phase)
        _copy(kv, here, kv_s, HALF, k_b, HALF, 8, BK)
        landing(full.index(1))
        mbarrier.wait(empty.index(2), phase)
        _copy(kv, here, kv_s, V, k_r, R, 8, BK)
        landing(full.index(2))
    mbarrier.wait(stored, work & 1)
    mbarrier.wait(empty.index(0), (done + tiles + 1) & 1)
    mbarrier.wait(empty.index(1), (done + tiles + 1) & 1)
    bring_back(weights, tiles_in(k_a, BK, BH), tiles_in(k_b, BK, BH), pair_full, pair_empty, tiles, done, BK, BH)


@gluon.jit
def _weigh(both_a, both_b, q_r, k_a, k_b, k_r, numbers, known, sums, ds_tile, p_tile, weights, full, ds_full, stored,
           pair_full, pair_empty, indices, to, tiles, done, rows, last, topk, i_k, scale,
           V: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr, CAUSAL: gl.constexpr,
           LISTED: gl.constexpr):  # fmt: skip
    """Probabilities and scores' gradients of all tiles [BK, BH], then the rows' gradients' last R channels."""
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BH, 16])
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BH, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, M)
    T: gl.constexpr = ds_tile.dtype
    score_scale = scale * LOG2_E
    for i in range(tiles):
        phase = (done + i) & 1
        mbarrier.wait(full.index(0), phase)
        fence_async_shared()
        both = gl.full([BK, 2 * BH], 0.0, gl.float32, BOTH)
        both = warpgroup_mma(k_a, both_a.permute((1, 0)), both, use_acc=False, is_async=True)
        mbarrier.wait(full.index(1), phase)
        fence_async_shared()
        both = warpgroup_mma(k_b, both_b.permute((1, 0)), both, is_async=True)
        mbarrier.wait(full.index(2), phase)
        fence_async_shared()
        both = warpgroup_mma_wait(0, deps=[both])
        # The rest is the scores' alone. Their sum is made of the first half's registers: there are none for another.
        s, dp = gl.split(gl.permute(gl.reshape(both, [BK, 2, BH]), (0, 2, 1)))
        s = gl.convert_layout(s, M, assert_trivial=True)
        dp = gl.convert_layout(dp, M, assert_trivial=True)
        s = warpgroup_mma(k_r, q_r.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        there = numbers.index(i & 1).load(gl.SliceLayout(1, M)) >= 0
        p = gl.exp2(s * score_scale - known.load(HEAD)[None, :])
        p = gl.where(there[:, None], p, 0.0)
        ds = p * (dp - sums.load(HEAD)[None, :]) * scale
        barrier()
        ds_tile.store(ds.to(T))
        p_tile.store(p.to(T))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ds_full, count=1)
        keep(ds_tile, weights + i * (2 * BK * BH), BK, BH)
        keep(p_tile, weights + i * (2 * BK * BH) + BK * BH, BK, BH)
    barrier()
    mbarrier.arrive(stored, count=1)
    rest_gradient(q_r, tiles_in(k_a, BK, BH), pair_full, pair_empty, indices, to, tiles, done, rows, last, topk, i_k,
                  V, R, BH, BK, CAUSAL, LISTED)  # fmt: skip


@gluon.jit
def _sum(both_a, both_b, k_a, k_b, k_r, ds_tile, full, empty, ds_full, pair_full, pair_empty, indices, to, dq, heads,
         tiles, done, rows, last, topk, i_k,
         V: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr, CAUSAL: gl.constexpr,
         LISTED: gl.constexpr):  # fmt: skip
    """dq [BH, V + R], by two warp groups, each with half of the channels; then the rows' gradients' first V."""
    HALF: gl.constexpr = V // 2
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, R // 2, 16])
    a = gl.full([BH, HALF], 0.0, gl.float32, M)
    b = gl.full([BH, HALF], 0.0, gl.float32, M)
    r = gl.full([BH, R], 0.0, gl.float32, REST)
    for i in range(tiles):
        phase = (done + i) & 1
        mbarrier.wait(full.index(0), phase)
        mbarrier.wait(full.index(1), phase)
        mbarrier.wait(full.index(2), phase)
        mbarrier.wait(ds_full, phase)
        fence_async_shared()
        ds = ds_tile.permute((1, 0))
        a = warpgroup_mma(ds, k_a, a, is_async=True)
        b = warpgroup_mma(ds, k_b, b, is_async=True)
        r = warpgroup_mma(ds, k_r, r, is_async=True)
        a, b, r = warpgroup_mma_wait(2, deps=[a, b, r])
        barrier()
        mbarrier.arrive(empty.index(0), count=1)
        a, b, r = warpgroup_mma_wait(1, deps=[a, b, r])
        barrier()
        mbarrier.arrive(empty.index(1), count=1)
        a, b, r = warpgroup_mma_wait(0, deps=[a, b, r])
        barrier()
        mbarrier.arrive(empty.index(2), count=1)
    _store(a, dq, heads, 0, V + R)
    _store(b, dq, heads, HALF, V + R)
    _store(r, dq, heads, V, V + R)
    values_gradient(both_a, both_b, tiles_in(k_a, BK, BH), tiles_in(k_b, BK, BH), pair_full, pair_empty, indices, to,
                    tiles, done, rows, last, topk, i_k, V, R, BH, BK, CAUSAL, LISTED)  # fmt: skip


@gluon.jit
def _store(x, dq, heads, first_lane: gl.constexpr, CHANNELS: gl.constexpr):
    L: gl.constexpr = x.type.layout
    h = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    lane = first_lane + gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    there = (h < heads)[:, None] & (lane >= 0)[None, :]
    gl.store(dq + h[:, None] * CHANNELS + lane[None, :], x.to(dq.dtype.element_ty), mask=there)


@gluon.jit
def _lanes(at, first_lane: gl.constexpr, LANES: gl.constexpr, L: gl.constexpr):
    """Some channels of the rows that begin at those addresses, 16 bytes a thread."""
    lane = first_lane + gl.arange(0, LANES, gl.SliceLayout(0, L))
    return gl.max_contiguous(gl.multiple_of(at[:, None] + lane[None, :], [1, 16]), [1, 8])


@gluon.jit
def _every(there, LANES: gl.constexpr, L: gl.constexpr):
    return there[:, None] & (gl.arange(0, LANES, gl.SliceLayout(0, L)) >= 0)[None, :]


@gluon.jit
def sparse_mla_backward(grad, q, kv, indices, out, lse, grad_lse, dq, to, weights, batches, tokens, first, count, rows,
                        heads, topk, offset, scale, g_b, g_t, g_h, q_b, q_t, q_h, kv_b, kv_s, i_b, i_t, i_k,
                        V: gl.constexpr, R: gl.constexpr, CAUSAL: gl.constexpr, WITH_LSE: gl.constexpr,
                        LISTED: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr, WEIGH_REGISTERS: gl.constexpr,
                        COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """Queries `first` to `first + count` of each sequence, BH heads at a time. Rows' gradients are added to `to`, dkv
    [b, rows, V + R] (float32, zeroed); or, if LISTED, of BH heads at most, stored there, [b, count, topk, V + R].
    Launched with eight warps, those of the sums."""
    T: gl.constexpr = q.dtype.element_ty
    HALF: gl.constexpr = V // 2
    OF_LANES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, HALF], T)
    OF_REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, R], T)
    OF_HEADS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BH], T)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    # Queries, and below them the output's gradients.
    both_a = gl.allocate_shared_memory(T, [2 * BH, HALF], OF_LANES)
    both_b = gl.allocate_shared_memory(T, [2 * BH, HALF], OF_LANES)
    q_r = gl.allocate_shared_memory(T, [BH, R], OF_REST)
    k_a = gl.allocate_shared_memory(T, [BK, HALF], OF_LANES)
    k_b = gl.allocate_shared_memory(T, [BK, HALF], OF_LANES)
    k_r = gl.allocate_shared_memory(T, [BK, R], OF_REST)
    ds_tile = gl.allocate_shared_memory(T, [BK, BH], OF_HEADS)
    p_tile = gl.allocate_shared_memory(T, [BK, BH], OF_HEADS)
    numbers = gl.allocate_shared_memory(gl.int32, [2, BK], FLAT)
    known = gl.allocate_shared_memory(gl.float32, [BH], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [BH], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [3, 1], BAR)
    pair_full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], BAR)
    pair_empty = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    stored = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for part in gl.static_range(3):
        mbarrier.init(full.index(part), count=129)
        mbarrier.init(empty.index(part), count=1)
    for slot in gl.static_range(PAIRS):
        mbarrier.init(pair_full.index(slot), count=129)
        mbarrier.init(pair_empty.index(slot), count=2)
    mbarrier.init(ds_full, count=1)
    mbarrier.init(stored, count=1)

    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    h = gl.arange(0, BH, gl.SliceLayout(1, L))
    across = (heads + BH - 1) // BH
    weights += gl.program_id(0).to(gl.int64) * ((topk + BK - 1) // BK) * (2 * BK * BH)
    done = 0
    work = 0
    for number in range(gl.program_id(0), batches * count * across, gl.num_programs(0)):
        query = number // across
        start = (number % across) * BH
        t, batch = (first + query % count).to(gl.int64), (query // count).to(gl.int64)
        here = h < heads - start
        last = (t + offset).to(gl.int32)
        place = (batch * tokens + t) * heads + start
        at_q = q + batch * q_b + t * q_t + (start + h).to(gl.int64) * q_h
        at_g = grad + batch * g_b + t * g_t + (start + h).to(gl.int64) * g_h
        at_o = out + (place + h) * V
        load_async(both_a.slice(0, BH, 0), _lanes(at_q, 0, HALF, L), mask=_every(here, HALF, L))
        load_async(both_a.slice(BH, BH, 0), _lanes(at_g, 0, HALF, L), mask=_every(here, HALF, L))
        load_async(both_b.slice(0, BH, 0), _lanes(at_q, HALF, HALF, L), mask=_every(here, HALF, L))
        load_async(both_b.slice(BH, BH, 0), _lanes(at_g, HALF, HALF, L), mask=_every(here, HALF, L))
        load_async(q_r, _lanes(at_q, V, R, L), mask=_every(here, R, L))
        async_copy.commit_group()
        # What the scores' gradients subtract: see `reference.attend_backward`.
        delta = gl.full([BH, R], 0.0, gl.float32, L)
        for lane in gl.static_range(0, V, R):
            x = gl.load(_lanes(at_g, lane, R, L), mask=_every(here, R, L), other=0.0)
            y = gl.load(_lanes(at_o, lane, R, L), mask=_every(here, R, L), other=0.0)
            delta += x.to(gl.float32) * y.to(gl.float32)
        delta = gl.sum(delta, 1)
        if WITH_LSE:
            delta -= gl.load(grad_lse + place + h, mask=here, other=0.0)
        sums.store(delta)
        own = gl.load(lse + place + h, mask=here, other=0.0)
        known.store(gl.where(own == float("-inf"), 0.0, own) * LOG2_E)
        mine = indices + batch * i_b + t * i_t
        tiles = tiles_of(mine, rows, last, topk, i_k, CAUSAL, BK)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if LISTED:
            to_here = to + (batch * count + query % count) * topk * (V + R)
        else:
            to_here = to + batch * rows * (V + R)
        gl.warp_specialize([
            (_sum, (both_a, both_b, k_a, k_b, k_r, ds_tile, full, empty, ds_full, pair_full, pair_empty, mine, to_here,
                    dq + place * (V + R), heads - start, tiles, done, rows, last, topk, i_k,
                    V, R, BH, BK, CAUSAL, LISTED)),
            (_weigh, (both_a, both_b, q_r, k_a, k_b, k_r, numbers, known, sums, ds_tile, p_tile, weights, full, ds_full,
                      stored, pair_full, pair_empty, mine, to_here, tiles, done, rows, last, topk, i_k, scale,
                      V, R, BH, BK, CAUSAL, LISTED)),
            (_bring, (kv + batch * kv_b, mine, weights, numbers, k_a, k_b, k_r, full, empty, stored, pair_full,
                      pair_empty, tiles, done, work, rows, last, topk, kv_s, i_k, V, R, BH, BK, CAUSAL)),
        ], [4, 4], [WEIGH_REGISTERS, COPY_REGISTERS])  # fmt: skip
        done += tiles
        work += 1
        barrier()
