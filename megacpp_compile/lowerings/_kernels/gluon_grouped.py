"""Grouped GEMMs on Hopper, in Gluon: as `triton_grouped`, by programs that stay and whose warps have roles.

A program takes one tile after another. Four of its warps bring operands, some steps ahead and on into the next tile;
two groups of four multiply, each 64 or 128 rows of a tile, and write what they have, one while the other still
multiplies. All find a tile's group alike, by walking over the groups' ends. TMA brings the weights, wherever they lie:
it is told of an array over all of them, in which each begins at a whole number of units.
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

from megacpp_compile.lowerings._kernels.gluon_results import halves, put
from megacpp_compile.lowerings._kernels.gluon_tiles import as_tiles, barrier, load_async, ring, shared_tiles, tma_load
from megacpp_compile.lowerings._kernels.triton_activations import product

# Rows of a warp group, or of half of what it has, and bits of a step of what is summed.
ROWS, STEP_BITS = gl.constexpr(64), gl.constexpr(1024)


@gluon.jit
def tiles_of(ends, rows, E: gl.constexpr, EP: gl.constexpr, BM: gl.constexpr):
    """How many tiles of BM rows all groups have, and the rows behind them."""
    e = gl.arange(0, EP, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    end = gl.load(ends + e, mask=e < E, other=0)
    start = gl.load(ends + e - 1, mask=(e > 0) & (e <= E), other=0)
    end = gl.where(e == E, rows, end)
    return gl.sum(gl.where(e <= E, (end - start + BM - 1) // BM, 0), 0)


@gluon.jit
def advanced(ends, rows, tile, group, start, end, before, behind, E: gl.constexpr, BM: gl.constexpr):
    """The group of a tile of BM rows, the rows where it starts and ends, and how many tiles lie before it, and before
    the next, from those of an earlier tile. Group E has the rows behind all others."""
    while (tile >= behind) & (group < E):
        group += 1
        start = end
        end = gl.load(ends + group, mask=group < E, other=rows)
        before = behind
        behind += (end - start + BM - 1) // BM
    return group, start, end, before, behind


@gluon.jit
def placed(tile, tall, across, NEAR: gl.constexpr):
    """(row, column, the first row near) of a tile among `tall` rows of `across`: by NEAR rows, in these by columns.
    What programs read at the same time is to fit into L2: with NEAR of 1 few rows, and of the weights a group's."""
    near = tile // (NEAR * across) * NEAR
    inside = tile % (NEAR * across)
    height = gl.minimum(NEAR, tall - near)
    return near + inside % height, inside // height, near


@gluon.jit
def found(ends, rows, tile, tiles, across, g, s, e, b, a, E: gl.constexpr, BM: gl.constexpr, NEAR: gl.constexpr):
    """A tile's group, its first row, where the group ends, and its column; and g, s, e, b and a for a later tile: what
    `advanced` gives for the first row of tiles near this one."""
    row, column, near = placed(tile, tiles, across, NEAR)
    g, s, e, b, a = advanced(ends, rows, near, g, s, e, b, a, E, BM)
    group, start, end, before, _ = advanced(ends, rows, row, g, s, e, b, a, E, BM)
    return group, start + (row - before) * BM, end, column, g, s, e, b, a


@gluon.jit
def after(slot, phase, STAGES: gl.constexpr):
    """The next place, and how many times all had been used, modulo 2."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _rows_at(x, take, first, rows, xs, BM: gl.constexpr, STEP: gl.constexpr, L: gl.constexpr):
    """Where rows `take` of a tile's begin. Rows of the next group, or the last again, rather than a mask: they are not
    written."""
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, L)), rows - 1)
    row = gl.load(take + row).to(gl.int64)
    return (x + row * xs)[:, None] + gl.arange(0, STEP, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def _bring_weights(weights, place, place_2, n, k, w_s, slot, full, PAIR: gl.constexpr, ACROSS: gl.constexpr):
    if PAIR:
        for which in gl.static_range(2):
            half = w_s.index(2 * slot + which)
            at = place if which == 0 else place_2
            tma_load(weights, [at, n, k], full, half.reshape([1, half.shape[0], half.shape[1]]))
    else:
        to = w_s.index(slot)
        to = to.reshape([1, to.shape[0], to.shape[1]])
        if ACROSS:
            tma_load(weights, [place, k, n], full, to)
        else:
            tma_load(weights, [place, n, k], full, to)


@gluon.jit
def bring(x, x2, weights, places, take, ends, rows, xs, depth, tiles, across, x_s, w_s, full, empty, E: gl.constexpr,
          TAKE: gl.constexpr, PAIR: gl.constexpr, SECOND: gl.constexpr, ACROSS: gl.constexpr, STAGES: gl.constexpr,
          BN: gl.constexpr, NEAR: gl.constexpr):  # fmt: skip
    """All operands of all tiles, in order, each step's when its memory is free."""
    BM: gl.constexpr = x_s.shape[1]
    STEP: gl.constexpr = x_s.shape[2]
    # Numbers of 16 bytes.
    VEC: gl.constexpr = 128 // x_s.dtype.primitive_bitwidth
    L: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [gl.num_warps(), 1], [1, 0])
    WIDTH: gl.constexpr = BN // 2 if PAIR else BN
    W_BYTES: gl.constexpr = BN * STEP_BITS // 8
    BYTES: gl.constexpr = W_BYTES if TAKE else W_BYTES + BM * STEP_BITS // 8
    g, s, e, b, a = -1, 0, 0, 0, 0
    slot, phase = 0, 0
    for tile in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        group, first, _, column, g, s, e, b, a = found(ends, rows, tile, tiles, across, g, s, e, b, a, E, BM, NEAR)
        if group < E:
            n = column * WIDTH
            place = gl.load(places + group)
            place_2 = gl.load(places + E + group) if PAIR or SECOND else place
            for part in gl.static_range(2 if SECOND else 1):
                if TAKE:
                    at = _rows_at(x, take, first, rows, xs, BM, STEP, L)
                for k in range(0, depth, STEP):
                    landed, x_here = full.index(slot), x_s.index(slot)
                    mbarrier.wait(empty.index(slot), phase ^ 1)
                    mbarrier.expect(landed, BYTES)
                    _bring_weights(
                        weights, place if part == 0 else place_2, place_2, n, k, w_s, slot, landed, PAIR, ACROSS
                    )
                    if TAKE:
                        # Divisible by bytes, contiguous by elements.
                        here = gl.max_contiguous(gl.multiple_of(at + k, [1, 16]), [1, VEC])
                        # Rows are multiples of as many channels.
                        vector = (k + gl.arange(0, STEP, gl.SliceLayout(0, L))) // VEC
                        load_async(x_here, here, mask=(vector < depth // VEC)[None, :])
                        async_copy.mbarrier_arrive(landed, increment_count=False)
                    else:
                        tma_load(x if part == 0 else x2, [first, k], landed, x_here)
                    slot, phase = after(slot, phase, STAGES)


@gluon.jit
def multiplied(x_s, w_s, full, empty, acc, slot, phase, steps, mine, WHICH: gl.constexpr, TAKE: gl.constexpr,
               ACROSS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """`acc` plus the GEMM of `mine` of so many steps, of rows of a tile that group WHICH of the warps has. A step's
    memory is free at once, not when the next has started: the other group multiplies meanwhile."""
    for _i in range(mine):
        mbarrier.wait(full.index(slot), phase)
        if TAKE:
            fence_async_shared()
        left = x_s.index(slot).slice(WHICH * acc.shape[0], acc.shape[0], 0)
        right = w_s.index(slot)
        acc = warpgroup_mma(left, right if ACROSS else right.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = after(slot, phase, STAGES)
    for _i in range(mine, steps):
        mbarrier.wait(full.index(slot), phase)
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = after(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def scaled_rows(acc, scale, take, first, stop, TAKE: gl.constexpr):
    """A GEMM of payloads times the scales of its rows, if they have such. From `stop` on these count as zero: rows of
    no group may be infinite, and so their scales."""
    if scale is not None:
        row = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        there = row < stop
        if TAKE:
            row = gl.load(take + row, mask=there, other=0)
        acc *= gl.load(scale + row, mask=there, other=0.0)[:, None]
    return acc


@gluon.jit
def _scaled_columns(x, scale, of, n, width):
    """Columns from `n` on times their scales, which lie from `of` on, if they have such."""
    if scale is not None:
        lane = n + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        x *= gl.load(scale + of + lane, mask=lane < width, other=0.0)[None, :]
    return x


@gluon.jit
def _multiply(ends, rows, depth, tiles, across, x_s, w_s, staged, full, empty, out, gate, up, take, x_scale, w_scale, N,
              hs, WHICH: gl.constexpr, E: gl.constexpr, TAKE: gl.constexpr, PAIR: gl.constexpr, SECOND: gl.constexpr,
              ACROSS: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, NEAR: gl.constexpr, NAME: gl.constexpr,
              CURVE: gl.constexpr):  # fmt: skip
    """Group WHICH of the warps that multiply: 64 rows of each tile, and what is made of them."""
    BM: gl.constexpr = x_s.shape[1]
    WIDTH: gl.constexpr = BN // 2 if PAIR else BN
    STEP: gl.constexpr = x_s.shape[2]
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, STEP // 4])
    g, s, e, b, a = -1, 0, 0, 0, 0
    slot, phase = 0, 0
    whole = (depth + STEP - 1) // STEP * (2 if SECOND else 1)
    for tile in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        group, first, end, column, g, s, e, b, a = found(ends, rows, tile, tiles, across, g, s, e, b, a, E, BM, NEAR)
        first += WHICH * ROWS
        n = column * WIDTH
        acc = gl.full([ROWS, BN], 0.0, gl.float32, M)
        steps = gl.where(group < E, whole, 0)
        acc, slot, phase = multiplied(
            x_s, w_s, full, empty, acc, slot, phase, steps, gl.where(first < end, steps, 0), WHICH, TAKE, ACROSS,
            STAGES,
        )
        acc = scaled_rows(acc, x_scale, take, first, gl.where(group < E, end, 0), TAKE)
        one, two = halves(acc)
        # Rows of no group are zero by now.
        of = gl.minimum(group, E - 1) * (2 * N if PAIR else N)
        one = _scaled_columns(one, w_scale, of, n, N)
        if PAIR:
            of_gate = one.to(staged.dtype)
            put(of_gate, staged, gate, first, end, n, N, hs)
            of_up = _scaled_columns(two, w_scale, of + N, n, N).to(staged.dtype)
            put(of_up, staged, up, first, end, n, N, hs)
            made = product(of_gate.to(gl.float32), of_up.to(gl.float32), NAME, CURVE, False)
            put(made, staged, out, first, end, n, N, N)
        else:
            put(one, staged, out, first, end, n, N, N)
            n += BN // 2
            put(_scaled_columns(two, w_scale, of, n, N), staged, out, first, end, n, N, N)


@gluon.jit
def grouped_rows_hopper(x, x2, weights, places, take, ends, out, gate, up, x_scale, w_scale, rows, xs, hs, depth, N,
                        E: gl.constexpr, EP: gl.constexpr, TAKE: gl.constexpr, PAIR: gl.constexpr,
                        SECOND: gl.constexpr, ACROSS: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr,
                        NEAR: gl.constexpr, NAME: gl.constexpr, CURVE: gl.constexpr, REGISTERS: gl.constexpr,
                        COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """As `triton_grouped.grouped_rows`; PAIR: as `triton_gated.grouped_gated`. x: the rows [., depth], or by a
    descriptor of tiles of 128 where there is no `take`; weights: by a descriptor of [unit, n, k] or, ACROSS,
    [unit, k, n]; places: of each group's weight, and of its second one E behind it, counted in units. Launched with 4
    warps, which become the first of those that multiply."""
    BM: gl.constexpr = 2 * ROWS
    T: gl.constexpr = weights.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    STEP: gl.constexpr = STEP_BITS // T.primitive_bitwidth
    WIDTH: gl.constexpr = BN // 2 if PAIR else BN
    across = (N + WIDTH - 1) // WIDTH
    W: gl.constexpr = [STEP, BN] if ACROSS else [BN, STEP]
    x_s = shared_tiles(T, STAGES, BM, STEP)
    w_s = shared_tiles(T, STAGES, W[0], W[1])
    if PAIR:
        # Gate's rows of a tile, and up's behind them, are two tiles for the copies and one for a GEMM.
        to_s = as_tiles(w_s, 2 * STAGES, BN // 2, STEP)
    else:
        to_s = w_s
    staged = shared_tiles(OUT, 2, ROWS, BN // 2)
    full, empty = ring(STAGES, 129 if TAKE else 1, 2)  # threads that copy arrive one by one; two groups free it
    tiles = tiles_of(ends, rows, E, EP, BM)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (_multiply, (ends, rows, depth, tiles, across, x_s, w_s, staged.index(0), full, empty, out, gate, up, take,
                     x_scale, w_scale, N, hs, 0, E, TAKE, PAIR, SECOND, ACROSS, STAGES, BN, NEAR, NAME, CURVE)),
        (_multiply, (ends, rows, depth, tiles, across, x_s, w_s, staged.index(1), full, empty, out, gate, up, take,
                     x_scale, w_scale, N, hs, 1, E, TAKE, PAIR, SECOND, ACROSS, STAGES, BN, NEAR, NAME, CURVE)),
        (bring, (x, x2, weights, places, take, ends, rows, xs, depth, tiles, across, x_s, to_s, full, empty, E, TAKE,
                 PAIR, SECOND, ACROSS, STAGES, BN, NEAR)),
    ], [4, 4], [REGISTERS, COPY_REGISTERS])  # fmt: skip
