"""How `sparse_mla`'s Gluon kernels bring a query's top-k rows into shared memory, tile by tile.

Row numbers are kept beside the rows, -1 for one that is not valid: zeros stand for it, and it is never read. A tile's
place is `full` when all of its copies have landed, `empty` when nobody reads it any more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from megacpp_compile.lowerings._kernels.gluon_tiles import barrier, load_async


@gluon.jit
def valid(index, place, rows, last, topk, CAUSAL: gl.constexpr):
    """Which of the rows named at those places their query may see."""
    named = (place < topk) & (index >= 0) & (index < rows)
    if CAUSAL:
        named = named & (index <= last)
    return named


@gluon.jit
def tiles_of(indices, rows, last, topk, i_k, CAUSAL: gl.constexpr, BK: gl.constexpr):
    """How many tiles reach up to the last valid row."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    most = gl.full([2048], 0, gl.int32, L)
    for first in range(0, topk, 2048):
        place = first + gl.arange(0, 2048, L)
        index = gl.load(indices + place * i_k, mask=place < topk, other=-1)
        most = gl.maximum(most, gl.where(valid(index, place, rows, last, topk, CAUSAL), place + 1, 0))
    return (gl.max(most, 0) + BK - 1) // BK


@gluon.jit
def named(indices, tile, topk, i_k, BK: gl.constexpr):
    """What is named at a tile's places."""
    place = tile * BK + gl.arange(0, BK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(indices + place * i_k, mask=place < topk, other=-1)


@gluon.jit
def kept(index, tile, rows, last, topk, CAUSAL: gl.constexpr, BK: gl.constexpr):
    """The row numbers of a tile, -1 where one is not valid."""
    place = tile * BK + gl.arange(0, BK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.where(valid(index, place, rows, last, topk, CAUSAL), index, -1).to(gl.int32)


@gluon.jit
def _addresses(kv, numbers, kv_s, first_lane, LANES: gl.constexpr, VEC: gl.constexpr, ROWS: gl.constexpr,
               START: gl.constexpr):  # fmt: skip
    """Where rows START to START + ROWS of a tile lie, 16 bytes a thread, and whether they are to be read."""
    ACROSS: gl.constexpr = min(32, LANES // VEC)
    L: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    number = numbers.slice(START, ROWS, 0).load(gl.SliceLayout(1, L))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, L))
    at = (kv + first_lane + gl.maximum(number, 0).to(gl.int64) * kv_s)[:, None] + lane[None, :]
    # Divisible by bytes, contiguous by elements.
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, VEC])
    return at, (number >= 0)[:, None] & (lane >= 0)[None, :]


@gluon.jit
def _copy(kv, numbers, kv_s, first_lane, to, LANES: gl.constexpr, VEC: gl.constexpr, BK: gl.constexpr):
    at, there = _addresses(kv, numbers, kv_s, first_lane, LANES, VEC, BK, 0)
    load_async(to, at, mask=there)


@gluon.jit
def copy(kv, kv_scale, numbers, scales, k_v, k_r, full, kv_s, s_s,
         V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr, VEC: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """Starts to copy a tile's rows, and their scales. `full` counts every thread, whose copies land when they will, and
    one more, which makes the numbers visible."""
    if SCALED:
        number = numbers.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        at = kv_scale + gl.maximum(number, 0).to(gl.int64) * s_s
        load_async(scales, at, mask=number >= 0)
    _copy(kv, numbers, kv_s, 0, k_v, V, VEC, BK)
    _copy(kv, numbers, kv_s, V, k_r, R, VEC, BK)
    async_copy.mbarrier_arrive(full, increment_count=False)
    mbarrier.arrive(full, count=1)


@gluon.jit
def _loaded(kv, numbers, kv_s, first_lane, LANES: gl.constexpr, ROWS: gl.constexpr, START: gl.constexpr):
    at, there = _addresses(kv, numbers, kv_s, first_lane, LANES, 16, ROWS, START)
    return gl.load(at, mask=there, other=0.0)


@gluon.jit
def _widen(x, scales, to, ROWS: gl.constexpr, START: gl.constexpr):
    L: gl.constexpr = x.type.layout
    scale = scales.slice(START, ROWS, 0).load(gl.SliceLayout(1, L))
    to.slice(START, ROWS, 0).store((x.to(gl.float32) * scale[:, None]).to(to.dtype))


@gluon.jit
def bring(kv, kv_scale, indices, numbers, scales, k_v, k_r, full, empty, tiles, rows, last, topk, kv_s, i_k, s_s,
          V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
          WIDENED: gl.constexpr):  # fmt: skip
    """All tiles, one after the other, by warps that do nothing else: rows of 16 bits a channel as they are, rows in fp8
    WIDENED to the queries' dtype, by way of registers."""
    HALF: gl.constexpr = BK // 2
    index = named(indices, 0, topk, i_k, BK)
    for i in range(tiles):
        slot = i % STAGES
        number = kept(index, i, rows, last, topk, CAUSAL, BK)
        index = named(indices, i + 1, topk, i_k, BK)
        numbers_here, k_v_here, k_r_here = numbers.index(slot), k_v.index(slot), k_r.index(slot)
        if WIDENED:
            at = kv_scale + gl.maximum(number, 0).to(gl.int64) * s_s
            scale = gl.load(at, mask=number >= 0, other=0.0).to(gl.float32)
        mbarrier.wait(empty.index(slot), (i // STAGES + 1) & 1)
        numbers_here.store(number)
        if WIDENED:
            scales_here = scales.index(slot)
            scales_here.store(scale)
            barrier()
            upper = _loaded(kv, numbers_here, kv_s, 0, V, HALF, 0)
            lower = _loaded(kv, numbers_here, kv_s, 0, V, HALF, HALF)
            rest = _loaded(kv, numbers_here, kv_s, V, R, BK, 0)
            _widen(upper, scales_here, k_v_here, HALF, 0)
            _widen(lower, scales_here, k_v_here, HALF, HALF)
            _widen(rest, scales_here, k_r_here, BK, 0)
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
        else:
            barrier()
            copy(kv, kv, numbers_here, numbers_here, k_v_here, k_r_here, full.index(slot), kv_s, 0, V, R, BK, 8, False)
