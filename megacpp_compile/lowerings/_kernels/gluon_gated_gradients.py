"""Backward's first grouped GEMM of a gated MLP on Hopper, with all that follows it up to the next ones, in Gluon;
`gluon_grouped` says how warps share the work. Gate and up come by TMA while the GEMM is under way."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from megacpp_compile.lowerings._kernels.gluon_grouped import (
    ROWS,
    STEP_BITS,
    bring,
    found,
    multiplied,
    scaled_rows,
    stage_barriers,
    tiles_of,
)
from megacpp_compile.lowerings._kernels.gluon_results import give, halves, upper_and_lower
from megacpp_compile.lowerings._kernels.gluon_tiles import barrier, tma_load
from megacpp_compile.lowerings._kernels.triton_activations import factors, passed_on


@gluon.jit
def _bring_hidden(gate, up, h_s, landed, first, n, turn, WHICH: gl.constexpr):
    """Piece `turn` of gate's and of up's rows."""
    PIECE: gl.constexpr = h_s.shape[2]
    mbarrier.expect(landed, 4 * ROWS * PIECE)
    for part in gl.static_range(2):
        to = h_s.index(8 * WHICH + 2 * (turn % 4) + part)
        tma_load(gate if part == 0 else up, [first + turn // 4 * ROWS, n + turn % 4 * PIECE], landed, to)


@gluon.jit
def _quarters(x, L: gl.constexpr):
    """Of the columns, as they lie in L."""
    left, right = halves(x)
    one, two = halves(left)
    three, four = halves(right)
    one, two = gl.convert_layout(one, L, True), gl.convert_layout(two, L, True)
    return one, two, gl.convert_layout(three, L, True), gl.convert_layout(four, L, True)


@gluon.jit
def _piece_of_gradients(d_a, h_s, a_s, h_full, gate, up, d_gate, d_up, out, scale, first, stop, n, N, turn,
                        WHICH: gl.constexpr, NAME: gl.constexpr, CURVE: gl.constexpr):  # fmt: skip
    """What piece `turn` of the rows from `first` on adds to `d_a . a`; the rest goes to memory."""
    LANES: gl.constexpr = h_s.shape[2]
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // LANES, LANES // 8], [gl.num_warps(), 1], [1, 0])
    gate_s, up_s = h_s.index(8 * WHICH + 2 * (turn % 4)), h_s.index(8 * WHICH + 2 * (turn % 4) + 1)
    landed = h_full.index(4 * WHICH + turn % 4)
    mbarrier.wait(landed, turn // 4)
    of_gate, of_up = gate_s.load(M).to(gl.float32), up_s.load(M).to(gl.float32)
    barrier()
    # One result after the other: for all that they take there are not registers enough at once.
    f, _, factor, _ = factors(of_gate, of_up, NAME, CURVE, False)
    a = f * factor
    dot = gl.sum(d_a * a, 1)
    a_s.store((a * scale).to(a_s.dtype))
    d_a *= scale
    slope = factors(of_gate, of_up, NAME, CURVE, False)[3]
    up_s.store(passed_on(d_a * f * slope, slope, NAME, CURVE).to(up_s.dtype))
    slope = factors(of_gate, of_up, NAME, CURVE, False)[1]
    gate_s.store(passed_on(d_a * slope * factor, slope, NAME, CURVE).to(gate_s.dtype))
    barrier()
    to_gate, to_up, to_out = gate_s.load(L), up_s.load(L), a_s.load(L)
    # Before anything goes to memory: a fence waits for that, too.
    fence_async_shared()
    barrier()
    if turn < 4:
        _bring_hidden(gate, up, h_s, landed, first, n, turn + 4, WHICH)
    first += turn // 4 * ROWS
    n += turn % 4 * LANES
    give(to_gate, d_gate, first, stop, n, N, 2 * N)
    give(to_up, d_up, first, stop, n, N, 2 * N)
    give(to_out, out, first, stop, n, N, N)
    return dot


@gluon.jit
def _zeros(to, first, stop, n, width, stride, COUNT: gl.constexpr, LANES: gl.constexpr):
    """As `give`, which here costs the pieces of other tiles 50 registers that are spilled (ptxas 12.8)."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // LANES, LANES // 8], [gl.num_warps(), 1], [1, 0])
    FEW: gl.constexpr = 32 * 8 // LANES * gl.num_warps()
    lane = n + gl.arange(0, LANES, gl.SliceLayout(0, L))
    zero = gl.full([FEW, LANES], 0.0, to.dtype.element_ty, L)
    for before in range(0, COUNT, FEW):
        row = first + before + gl.arange(0, FEW, gl.SliceLayout(1, L))
        at = to + row.to(gl.int64)[:, None] * stride + lane[None, :]
        at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
        gl.store(at, zero, mask=(row < stop)[:, None] & (lane // 8 < width // 8)[None, :])


@gluon.jit
def _no_dots(to, first, stop, COUNT: gl.constexpr):
    row = first + gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(to + row, row * 0.0, mask=row < stop)


@gluon.jit
def _multiply_gradients(ends, rows, depth, tiles, across, x_s, w_s, h_s, a_s, full, empty, h_full, gate, up, gates,
                        d_gate, d_up, out, dots, take, x_scale, N, WHICH: gl.constexpr, E: gl.constexpr,
                        TAKE: gl.constexpr, ACROSS: gl.constexpr, STAGES: gl.constexpr, NEAR: gl.constexpr,
                        NAME: gl.constexpr, CURVE: gl.constexpr):  # fmt: skip
    """Group WHICH of the warps that multiply: 128 rows of each tile, and behind the GEMM in pieces of 64 x 32."""
    BM: gl.constexpr = x_s.shape[1]
    BN: gl.constexpr = w_s.shape[2] if ACROSS else w_s.shape[1]
    MINE: gl.constexpr = BM // 2
    PIECE: gl.constexpr = h_s.shape[2]
    STEP: gl.constexpr = x_s.shape[2]
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, STEP // 4])
    P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, P)
    g, s, e, b, a = -1, 0, 0, 0, 0
    slot, phase = 0, 0
    whole = (depth + STEP - 1) // STEP
    for tile in range(gl.program_id(0), tiles * across, gl.num_programs(0)):
        group, first, end, column, g, s, e, b, a = found(ends, rows, tile, tiles, across, g, s, e, b, a, E, BM, NEAR)
        first += WHICH * MINE
        n = column * BN
        there = group < E
        for place in gl.static_range(4):
            if there:
                _bring_hidden(gate, up, h_s, h_full.index(4 * WHICH + place), first, n, place, WHICH)
        mine = first + gl.arange(0, ROWS, OF_ROW)
        upper_scale = gl.load(gates + mine, mask=mine < end, other=0.0)
        lower_scale = gl.load(gates + mine + ROWS, mask=mine + ROWS < end, other=0.0)
        acc = gl.full([MINE, BN], 0.0, gl.float32, M)
        steps = gl.where(there, whole, 0)
        acc, slot, phase = multiplied(
            x_s, w_s, full, empty, acc, slot, phase, steps, gl.where(first < end, steps, 0), WHICH, TAKE, ACROSS, STAGES
        )
        acc = scaled_rows(acc, x_scale, take, first, end, TAKE)
        dots_here = dots + column.to(gl.int64) * rows
        if there:
            upper, lower = upper_and_lower(acc)
            one, two, three, four = _quarters(upper, P)
            five, six, seven, eight = _quarters(lower, P)
            dot = gl.full([ROWS], 0.0, gl.float32, OF_ROW)
            # Pieces change names rather than the code being there eight times: then it would not fit into the cache of
            # instructions, and take twice as long.
            for turn in range(8):
                scale = gl.where(turn < 4, upper_scale, lower_scale)
                added = _piece_of_gradients(
                    one, h_s, a_s.index(WHICH), h_full, gate, up, d_gate, d_up, out, scale[:, None], first, end, n, N,
                    turn, WHICH, NAME, CURVE,
                )  # fmt: skip
                dot = gl.where(turn % 4 == 0, added, dot + added)
                row = first + turn // 4 * ROWS + gl.arange(0, ROWS, OF_ROW)
                gl.store(dots_here + row, dot, mask=(row < end) & (turn % 4 == 3))
                one, two, three, four, five, six, seven, eight = two, three, four, five, six, seven, eight, one
        else:
            _zeros(d_gate, first, end, n, N, 2 * N, MINE, BN)
            _zeros(d_up, first, end, n, N, 2 * N, MINE, BN)
            _zeros(out, first, end, n, N, N, MINE, BN)
            _no_dots(dots_here, first, end, MINE)


@gluon.jit
def gated_gradients_hopper(x, weights, places, take, ends, gate, up, gates, d_gate, d_up, out, dots, x_scale, rows, xs,
                           depth, N, E: gl.constexpr, EP: gl.constexpr, TAKE: gl.constexpr, ACROSS: gl.constexpr,
                           STAGES: gl.constexpr, NEAR: gl.constexpr, NAME: gl.constexpr, CURVE: gl.constexpr,
                           REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """As `triton_gated_gradients.gated_gradients`. x: as in `grouped_rows_hopper`, with tiles of 256 rows; weights: by
    a descriptor of [unit, N, depth] or, ACROSS, [unit, depth, N]; gate and up: [rows, N] by descriptors."""
    BM: gl.constexpr = 256
    BN: gl.constexpr = 128
    T: gl.constexpr = weights.dtype
    STEP: gl.constexpr = STEP_BITS // T.primitive_bitwidth
    across = (N + BN - 1) // BN
    x_s = gl.allocate_shared_memory(T, [STAGES, BM, STEP], gl.NVMMASharedLayout.get_default_for([BM, STEP], T))
    W: gl.constexpr = [STEP, BN] if ACROSS else [BN, STEP]
    w_s = gl.allocate_shared_memory(T, [STAGES, W[0], W[1]], gl.NVMMASharedLayout.get_default_for(W, T))
    H: gl.constexpr = gate.dtype
    PIECES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BN // 4], H)
    h_s = gl.allocate_shared_memory(H, [16, ROWS, BN // 4], PIECES)
    a_s = gl.allocate_shared_memory(H, [2, ROWS, BN // 4], PIECES)
    full, empty = stage_barriers(STAGES, TAKE)
    h_full = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(8):
        mbarrier.init(h_full.index(place), count=1)
    tiles = tiles_of(ends, rows, E, EP, BM)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (_multiply_gradients, (ends, rows, depth, tiles, across, x_s, w_s, h_s, a_s, full, empty, h_full, gate, up,
                               gates, d_gate, d_up, out, dots, take, x_scale, N, 0, E, TAKE, ACROSS, STAGES, NEAR,
                               NAME, CURVE)),
        (_multiply_gradients, (ends, rows, depth, tiles, across, x_s, w_s, h_s, a_s, full, empty, h_full, gate, up,
                               gates, d_gate, d_up, out, dots, take, x_scale, N, 1, E, TAKE, ACROSS, STAGES, NEAR,
                               NAME, CURVE)),
        (bring, (x, x, weights, places, take, ends, rows, xs, depth, tiles, across, x_s, w_s, full, empty, E, TAKE,
                 False, False, ACROSS, STAGES, BN, NEAR)),
    ], [4, 4], [REGISTERS, COPY_REGISTERS])  # fmt: skip
