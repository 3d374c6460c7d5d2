"""The second pass of `sparse_mla`'s backward in Gluon: rows' gradients, out of the probabilities and scores' gradients
that the first pass has kept.

A thread of the tensor cores' layout has two neighbouring channels of a row, and then others: memory would be added to
in pieces of 32 bytes. Channels of queries and gradients are therefore turned in shared memory, once a query, so that a
thread's sums are of 4 (or 8) neighbouring channels of the row.
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

from megacpp_compile.lowerings._kernels.gluon_tiles import as_tiles, barrier, load_async
from megacpp_compile.lowerings.sparse_mla._gluon_rows import valid

PAIRS = gl.constexpr(4)  # places for tiles of probabilities and scores' gradients
# Sums of 64 rows by 256 channels over eight warps, and by 64 over four, with four or eight neighbours in a thread.
_LANES_4, _LANES_8 = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
_HALF_4 = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], _LANES_4, [*_WARPS, [0, 128]], [], [64, 256]))  # fmt: skip
_HALF_8 = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], _LANES_8, [*_WARPS, [0, 128]], [], [64, 256]))  # fmt: skip
_REST_4 = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], _LANES_4, _WARPS, [], [64, 64]))  # fmt: skip
_REST_8 = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], _LANES_8, _WARPS, [], [64, 64]))  # fmt: skip


@gluon.jit
def tiles_in(memory, BK: gl.constexpr, BH: gl.constexpr):
    """The memory of half a tile's channels as PAIRS tiles [BK, BH]."""
    return as_tiles(memory, PAIRS, BK, BH)


@gluon.jit
def landing(full):
    """Each thread's copies arrive when they land, and one arrives for what it has written."""
    async_copy.mbarrier_arrive(full, increment_count=False)
    mbarrier.arrive(full, count=1)


@gluon.jit
def keep(tile, to, BK: gl.constexpr, BH: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r, h = gl.arange(0, BK, gl.SliceLayout(1, L)), gl.arange(0, BH, gl.SliceLayout(0, L))
    at = to + r[:, None] * BH + h[None, :]
    gl.store(gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8]), tile.load(L))


@gluon.jit
def bring_back(weights, ds_tiles, p_tiles, full, empty, tiles, done, BK: gl.constexpr, BH: gl.constexpr):
    """What was kept, tile by tile; `done` tiles came before."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r, h = gl.arange(0, BK, gl.SliceLayout(1, L)), gl.arange(0, BH, gl.SliceLayout(0, L))
    inner = r[:, None] * BH + h[None, :]
    for i in range(tiles):
        slot = (done + i) % PAIRS
        mbarrier.wait(empty.index(slot), ((done + i) // PAIRS + 1) & 1)
        at = gl.max_contiguous(gl.multiple_of(weights + i * (2 * BK * BH) + inner, [1, 16]), [1, 8])
        load_async(ds_tiles.index(slot), at)
        load_async(p_tiles.index(slot), gl.max_contiguous(gl.multiple_of(at + BK * BH, [1, 16]), [1, 8]))
        landing(full.index(slot))


@gluon.jit
def turn(memory, GROUP: gl.constexpr):
    """Columns 2 * GROUP * j + 2 * g + e become 8 * g + 2 * j + e, within each 8 * GROUP."""
    ROWS: gl.constexpr = memory.shape[0]
    LANES: gl.constexpr = memory.shape[1]
    x = memory.load(gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    x = gl.permute(gl.reshape(x, [ROWS, LANES // (8 * GROUP), 4, GROUP, 2]), (0, 1, 3, 2, 4))
    barrier()
    memory.store(gl.reshape(x, [ROWS, LANES]))


@gluon.jit
def _in_order(x, GROUP: gl.constexpr, L: gl.constexpr):
    """Sums by the channels' own order; nothing moves but names."""
    ROWS: gl.constexpr = x.shape[0]
    LANES: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [ROWS, LANES // (8 * GROUP), GROUP, 4, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(x, [ROWS, LANES]), L)


@gluon.jit
def _target(indices, tile, rows, last, topk, i_k, CAUSAL: gl.constexpr, LISTED: gl.constexpr, BK: gl.constexpr,
            L: gl.constexpr):  # fmt: skip
    """Which of the result's rows each of a tile's goes to, -1 for none: the row it is, or the pair it is of."""
    place = tile * BK + gl.arange(0, BK, L)
    index = gl.load(indices + place * i_k, mask=place < topk, other=-1)
    there = valid(index, place, rows, last, topk, CAUSAL)
    if LISTED:
        return gl.where(there, place, -1).to(indices.dtype.element_ty)
    else:
        return gl.where(there, index, -1)


@gluon.jit
def _write(x, to, target, first_lane: gl.constexpr, CHANNELS: gl.constexpr, LISTED: gl.constexpr):
    L: gl.constexpr = x.type.layout
    lane = first_lane + gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    at = (to + gl.maximum(target, 0).to(gl.int64) * CHANNELS)[:, None] + lane[None, :]
    there = (target >= 0)[:, None] & (lane >= 0)[None, :]
    if LISTED:
        at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
        gl.store(at, x.to(to.dtype.element_ty), mask=there)
    else:
        at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 4])
        gl.atomic_add(at, x, mask=there, sem="relaxed")


@gluon.jit
def rest_gradient(q_r, ds_tiles, full, empty, indices, to, tiles, done, rows, last, topk, i_k,
                  V: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr, CAUSAL: gl.constexpr,
                  LISTED: gl.constexpr):  # fmt: skip
    """The last R channels of all rows, by one warp group."""
    GROUP: gl.constexpr = 4 if LISTED else 2
    OUT: gl.constexpr = _REST_8 if LISTED else _REST_4
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    zero = gl.full([BK, R], 0.0, gl.float32, M)
    turn(q_r, GROUP)
    fence_async_shared()
    barrier()
    for i in range(tiles):
        slot = (done + i) % PAIRS
        target = _target(indices, i, rows, last, topk, i_k, CAUSAL, LISTED, BK, gl.SliceLayout(1, OUT))
        mbarrier.wait(full.index(slot), ((done + i) // PAIRS) & 1)
        fence_async_shared()
        x = warpgroup_mma(ds_tiles.index(slot), q_r, zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        _write(_in_order(x, GROUP, OUT), to, target, V, V + R, LISTED)


@gluon.jit
def values_gradient(both_a, both_b, ds_tiles, p_tiles, full, empty, indices, to, tiles, done, rows, last, topk, i_k,
                    V: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr, CAUSAL: gl.constexpr,
                    LISTED: gl.constexpr):  # fmt: skip
    """The first V channels of all rows, by two warp groups: one half is written while the other is multiplied."""
    HALF: gl.constexpr = V // 2
    GROUP: gl.constexpr = 4 if LISTED else 2
    OUT: gl.constexpr = _HALF_8 if LISTED else _HALF_4
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    zero = gl.full([BK, HALF], 0.0, gl.float32, M)
    turn(both_a, GROUP)
    turn(both_b, GROUP)
    fence_async_shared()
    barrier()
    q_a, g_a = both_a.slice(0, BH, 0), both_a.slice(BH, BH, 0)
    q_b, g_b = both_b.slice(0, BH, 0), both_b.slice(BH, BH, 0)
    for i in range(tiles):
        slot = (done + i) % PAIRS
        target = _target(indices, i, rows, last, topk, i_k, CAUSAL, LISTED, BK, gl.SliceLayout(1, OUT))
        mbarrier.wait(full.index(slot), ((done + i) // PAIRS) & 1)
        fence_async_shared()
        ds, p = ds_tiles.index(slot), p_tiles.index(slot)
        x = warpgroup_mma(ds, q_a, zero, use_acc=False, is_async=True)
        x = warpgroup_mma(p, g_a, x, is_async=True)
        y = warpgroup_mma(ds, q_b, zero, use_acc=False, is_async=True)
        y = warpgroup_mma(p, g_b, y, is_async=True)
        x, y = warpgroup_mma_wait(2, deps=[x, y])
        _write(_in_order(x, GROUP, OUT), to, target, 0, V + R, LISTED)
        y = warpgroup_mma_wait(0, deps=[y])
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        _write(_in_order(y, GROUP, OUT), to, target, HALF, V + R, LISTED)
