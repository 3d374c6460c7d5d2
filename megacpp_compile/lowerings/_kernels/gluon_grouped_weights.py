"""Gradients of the weights of grouped GEMMs on Hopper, in Gluon; `gluon_grouped` says how warps share the work.

Both operands lie across: rows are what is summed. Those of one may be gathered, by copies of 16 bytes; TMA brings the
other, with rows of the next group behind a group's last ones. Zeros take their place: what is there may be NaN.
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

from megacpp_compile.lowerings._kernels.gluon_grouped import ROWS, after, placed
from megacpp_compile.lowerings._kernels.gluon_results import halves, put, upper_and_lower
from megacpp_compile.lowerings._kernels.gluon_tiles import as_tiles, barrier, load_async, ring, shared_tiles, tma_load

# Rows of a step of what is summed.
STEP = gl.constexpr(64)


@gluon.jit
def _placed(tile, tall, across, BM: gl.constexpr, BN: gl.constexpr, NEAR: gl.constexpr):
    """A tile's group, and its first channels of `grad` and of x."""
    row, column, _ = placed(tile % (tall * across), tall, across, NEAR)
    return tile // (tall * across), row * BM, column * BN


@gluon.jit
def _rows_taken(take, first, stop, TAKE: gl.constexpr, L: gl.constexpr):
    """Which rows the next STEP are; the first of all in place of those from `stop` on."""
    row = first + gl.arange(0, STEP, L)
    if TAKE:
        row = gl.load(take + row, mask=row < stop, other=0)
    return row


@gluon.jit
def _bring_channels(x, x_tiles, row, first, stop, n, width, stride, landed, to, TAKE: gl.constexpr, L: gl.constexpr):
    """Channels of the next STEP rows: zeros from `stop` on if TAKE, else those of the next group."""
    if TAKE:
        lane = n + gl.arange(0, to.shape[1], gl.SliceLayout(0, L))
        at = (x + row.to(gl.int64) * stride)[:, None] + lane[None, :]
        at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
        inside = first + gl.arange(0, STEP, gl.SliceLayout(1, L)) < stop
        load_async(to, at, mask=inside[:, None] & (lane // 8 < width // 8)[None, :])
    else:
        tma_load(x_tiles, [first, n], landed, to)


@gluon.jit
def _bring_rows_of(grad, grad_tiles, x, x_tiles, take_grad, take_x, ends, tiles, tall, across, gs, xs, N, K, g_s, x_s,
                   full, empty, TAKE_GRAD: gl.constexpr, TAKE_X: gl.constexpr, STAGES: gl.constexpr,
                   NEAR: gl.constexpr):  # fmt: skip
    BM: gl.constexpr = g_s.shape[2]
    BN: gl.constexpr = x_s.shape[2]
    BYTES: gl.constexpr = (0 if TAKE_GRAD else 2 * STEP * BM) + (0 if TAKE_X else 2 * STEP * BN)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    slot, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, n, k = _placed(tile, tall, across, BM, BN, NEAR)
        start = gl.load(ends + group - 1, mask=group > 0, other=0)
        stop = gl.load(ends + group)
        coming_g = _rows_taken(take_grad, start, stop, TAKE_GRAD, R)
        coming_x = _rows_taken(take_x, start, stop, TAKE_X, R)
        for first in range(start, stop, STEP):
            row_g, row_x = coming_g, coming_x
            coming_g = _rows_taken(take_grad, first + STEP, stop, TAKE_GRAD, R)
            coming_x = _rows_taken(take_x, first + STEP, stop, TAKE_X, R)
            landed = full.index(slot)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            if BYTES == 0:
                mbarrier.arrive(landed, count=1)
            else:
                mbarrier.expect(landed, BYTES)
            _bring_channels(grad, grad_tiles, row_g, first, stop, n, N, gs, landed, g_s.index(slot), TAKE_GRAD, L)
            _bring_channels(x, x_tiles, row_x, first, stop, k, K, xs, landed, x_s.index(slot), TAKE_X, L)
            if TAKE_GRAD or TAKE_X:
                async_copy.mbarrier_arrive(landed, increment_count=False)
            slot, phase = after(slot, phase, STAGES)


@gluon.jit
def _cut(tiles, first, rows, COUNT: gl.constexpr):
    """Zeros for the rows from number `rows` on, of COUNT tiles from number `first` on: 0 times NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    kept = gl.arange(0, tiles.shape[1], gl.SliceLayout(1, L)) < rows
    for which in gl.static_range(COUNT):
        tile = tiles.index(first + which)
        x = tile.load(L)
        tile.store(gl.where(kept[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _multiplied(left, right, acc, empty):
    acc = warpgroup_mma(left.permute((1, 0)), right, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(empty, count=1)
    return acc


@gluon.jit
def _multiply_rows_of(ends, tiles, tall, across, g_s, g_pieces, x_s, x_pieces, staged, full, empty, out, N, K,
                      WHICH: gl.constexpr, TAKE_GRAD: gl.constexpr, TAKE_X: gl.constexpr,
                      STAGES: gl.constexpr, NEAR: gl.constexpr):  # fmt: skip
    """Group WHICH of the warps that multiply: half of each tile's channels of `grad`."""
    WM: gl.constexpr = g_s.shape[2]
    BN: gl.constexpr = x_s.shape[2]
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    slot, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, n, k = _placed(tile, tall, across, 2 * WM, BN, NEAR)
        n += WHICH * WM
        start = gl.load(ends + group - 1, mask=group > 0, other=0)
        rows = gl.load(ends + group) - start
        steps = rows // STEP
        acc = gl.full([WM, BN], 0.0, gl.float32, M)
        for _i in range(steps):
            mbarrier.wait(full.index(slot), phase)
            if TAKE_GRAD or TAKE_X:
                fence_async_shared()
            acc = _multiplied(g_s.index(2 * slot + WHICH), x_s.index(slot), acc, empty.index(slot))
            slot, phase = after(slot, phase, STAGES)
        if rows % STEP > 0:
            mbarrier.wait(full.index(slot), phase)
            if not TAKE_GRAD:
                _cut(g_pieces, (2 * slot + WHICH) * (WM // 64), rows % STEP, WM // 64)
            if not TAKE_X:
                _cut(x_pieces, slot * (BN // 64), rows % STEP, BN // 64)
            fence_async_shared()
            barrier()
            acc = _multiplied(g_s.index(2 * slot + WHICH), x_s.index(slot), acc, empty.index(slot))
            slot, phase = after(slot, phase, STAGES)
        to = out + group.to(gl.int64) * N * K
        one, two = halves(acc) if WM == ROWS else upper_and_lower(acc)
        put(one, staged, to, n, N, k, K, K)
        if WM == ROWS:
            put(two, staged, to, n, N, k + BN // 2, K, K)
        else:
            put(two, staged, to, n + ROWS, N, k, K, K)


@gluon.jit
def grouped_weights_hopper(grad, grad_tiles, x, x_tiles, take_grad, take_x, ends, out, tiles, gs, xs, N, K,
                           TAKE_GRAD: gl.constexpr, TAKE_X: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr,
                           BN: gl.constexpr, NEAR: gl.constexpr, REGISTERS: gl.constexpr,
                           COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """As `triton_grouped.grouped_weights`: out [E, N, K], `grad` and `x` by their rows and by descriptors of STEP rows;
    `tiles` of BM x BN of all groups. Launched as `grouped_rows_hopper`."""
    T: gl.constexpr = x.dtype.element_ty
    across = (K + BN - 1) // BN
    tall = (N + BM - 1) // BM
    g_s = shared_tiles(T, STAGES, STEP, BM)
    x_s = shared_tiles(T, STAGES, STEP, BN)
    staged = shared_tiles(T, 2, ROWS, 128)
    full, empty = ring(STAGES, 129 if TAKE_GRAD or TAKE_X else 1, 2)  # as `grouped_rows_hopper`
    half_s = as_tiles(g_s, 2 * STAGES, STEP, BM // 2)
    g_pieces = as_tiles(g_s, STAGES * (BM // 64), STEP, 64)
    x_pieces = as_tiles(x_s, STAGES * (BN // 64), STEP, 64)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (_multiply_rows_of, (ends, tiles, tall, across, half_s, g_pieces, x_s, x_pieces, staged.index(0), full,
                             empty, out, N, K, 0, TAKE_GRAD, TAKE_X, STAGES, NEAR)),
        (_multiply_rows_of, (ends, tiles, tall, across, half_s, g_pieces, x_s, x_pieces, staged.index(1), full,
                             empty, out, N, K, 1, TAKE_GRAD, TAKE_X, STAGES, NEAR)),
        (_bring_rows_of, (grad, grad_tiles, x, x_tiles, take_grad, take_x, ends, tiles, tall, across, gs, xs, N, K,
                          g_s, x_s, full, empty, TAKE_GRAD, TAKE_X, STAGES, NEAR)),
    ], [4, 4], [REGISTERS, COPY_REGISTERS])  # fmt: skip
