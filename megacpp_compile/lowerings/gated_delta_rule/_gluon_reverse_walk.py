"""The walk from the last chunk to the first on Hopper, in Gluon: the gradient of the state transposed, in registers.

As in `_gluon_walk`, what GEMMs hand to each other are left operands in registers, and warps have roles: four walk, one
brings a chunk's operands, and one takes away what the chunk gives. A program has half of V's channels, so that half of
a GPU's multiprocessors are free for what does not wait for it (`_after_prepare`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megacpp_compile.lowerings._kernels.gluon_tiles import (
    barrier,
    barriers,
    bring_tokens,
    next_slot,
    ring,
    scaled,
    shared_tile,
    shared_tiles,
    tma_load,
    tma_store,
)


@gluon.jit
def _row_factors(decay, norms, steps, row, there, scale, C: gl.constexpr, CHANNELS: gl.constexpr):
    """What multiplies rows of dR where keys read the state, and, with gates a head, of dU and of dO: [4 C]."""
    place = gl.arange(0, 4 * C, gl.BlockedLayout([2], [32], [4], [0]))
    which, at = place // C, place % C
    step = 0.0 - gl.load(steps + row * C + at, mask=there & (which == 0), other=0.0)
    if CHANNELS:
        return step
    else:
        whole = gl.load(decay + row * C + C - 1, mask=there, other=0.0)
        read = there & (which < 3)
        total = gl.load(decay + row * C + at, mask=read, other=0.0)
        norm = gl.load(norms + (2 * row + gl.where(which == 2, 0, 1)) * C + at, mask=read, other=0.0)
        into = norm * gl.exp2(gl.where(which == 1, whole - total, total))
        return into * gl.where(which == 0, step, gl.where(which == 1, 1.0, scale))


@gluon.jit
def _end_factors(ends, heads, more, i, K: gl.constexpr):
    """What multiplies a channel of the gradient before a chunk's, and behind it. more: chunks before it in its row."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = ends + gl.arange(0, K, L)
    always = gl.full([K], 0, gl.int32, L) == 0
    leaves = gl.load(at + 2 * K, mask=always & (more >= 0), other=0.0)
    leaves += gl.load(at + heads.to(gl.int64) * 3 * K + K, mask=always & (i > 0), other=0.0)
    return gl.exp2(leaves), gl.exp2(gl.load(at, mask=always & (more >= 0), other=0.0))


@gluon.jit
def _gradients(k_s, q_s, out_s, t_s, p_s, do_s, state_s, row_s, full, empty, state_full, state_empty, row_full,
               row_empty, decay, steps, norms, ends, last, d_initial, heads, chunks, scale, h, b, column,
               C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, CHANNELS: gl.constexpr,
               LAST: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The state's gradient, from chunk to chunk, by one warp group."""
    T: gl.constexpr = gl.bfloat16
    OF_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_C, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, OF_S, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, OF_C)
    KEY: gl.constexpr = gl.SliceLayout(0, OF_S)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.float32, [2, 4 * C], FLAT)
    of_channels = gl.allocate_shared_memory(gl.float32, [4, K], FLAT)
    row = (b * chunks + chunks - 1) * heads + h  # of the last chunk
    whole_state = (b * heads + h).to(gl.int64) * K * V + column
    if LAST:
        at = gl.arange(0, K, KEY)[None, :] * V + gl.arange(0, BV, gl.SliceLayout(1, OF_S))[:, None]
        state = gl.load(last + whole_state + at).to(gl.float32)
    else:
        state = gl.full([BV, K], 0.0, gl.float32, OF_S)
    zero = gl.full([BV, C], 0.0, gl.float32, OF_C)
    rows.index(0).store(_row_factors(decay, norms, steps, row, True, scale, C, CHANNELS))
    whole_coming = 0.0
    if CHANNELS:
        leaves, whole = _end_factors(ends + row.to(gl.int64) * 3 * K, heads, chunks - 1, 0, K)
        of_channels.index(0).store(leaves)
        of_channels.index(1).store(whole)
    else:
        whole_coming = gl.exp2(gl.load(decay + row * C + C - 1))
    barrier()
    slot, phase = 0, 0
    for i in range(chunks):
        c = chunks - 1 - i
        row = (b * chunks + c) * heads + h
        mine = rows.index(i & 1)
        coming = _row_factors(decay, norms, steps, row - heads, c > 0, scale, C, CHANNELS)
        if CHANNELS:
            state = state * of_channels.index((i & 1) * 2).load(KEY)[None, :]
            next_leaves, next_whole = _end_factors(ends + (row - heads).to(gl.int64) * 3 * K, heads, c - 1, 1, K)
        else:
            whole = whole_coming
            whole_coming = gl.exp2(gl.load(decay + (row - heads) * C + C - 1, mask=c > 0, other=0.0))
        leaving = state.to(T)
        operand = gl.convert_layout(leaving, LEFT_S)
        if CHANNELS:
            state = scaled(state, of_channels.index((i & 1) * 2 + 1).load(KEY)[None, :])
        else:
            state = scaled(state, whole)
        mbarrier.wait(full.index(slot), phase)
        grad = do_s.index(slot).permute((1, 0)).load(OF_C)
        d = warpgroup_mma(operand, out_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        local = warpgroup_mma(gl.convert_layout(grad, LEFT), p_s.index(slot).permute((1, 0)), zero, use_acc=False,
                              is_async=True)  # fmt: skip
        if CHANNELS:
            grad = grad.to(gl.float32) * scale
        else:
            grad = grad.to(gl.float32) * mine.slice(2 * C, C).load(TOKEN)[None, :]
        state = warpgroup_mma(gl.convert_layout(grad.to(T), LEFT), q_s.index(slot), state, is_async=True)
        mbarrier.wait(state_empty, (i & 1) ^ 1)
        state_s.permute((1, 0)).store(leaving)
        rows.index(1 - (i & 1)).store(coming)
        if CHANNELS:
            of_channels.index(2 - (i & 1) * 2).store(next_leaves)
            of_channels.index(3 - (i & 1) * 2).store(next_whole)
        fence_async_shared()
        barrier()
        mbarrier.arrive(state_full, count=1)
        d, local, state = warpgroup_mma_wait(1, deps=[d, local, state])
        if not CHANNELS:
            d = d * mine.slice(C, C).load(TOKEN)[None, :]
        d = gl.convert_layout((d + local).to(T), LEFT)
        d = warpgroup_mma(d, t_s.index(slot), zero, use_acc=False, is_async=True)
        mbarrier.wait(row_empty, (i & 1) ^ 1)
        d, state = warpgroup_mma_wait(0, deps=[d, state])
        taken = gl.convert_layout((d * mine.slice(0, C).load(TOKEN)[None, :]).to(T), LEFT)
        state = warpgroup_mma(taken, k_s.index(slot), state, is_async=True)
        row_s.permute((1, 0)).store(d.to(T))
        fence_async_shared()
        barrier()
        mbarrier.arrive(row_full, count=1)
        state = warpgroup_mma_wait(0, deps=[state])
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    if CHANNELS:
        first = (b * chunks * heads + h).to(gl.int64)
        state = state * gl.exp2(gl.load(ends + first * 3 * K + K + gl.arange(0, K, KEY)))[None, :]
    # Places are made anew, with a 0 that no compiler knows: they would take registers from before the loop on.
    at = gl.arange(0, K, KEY)[None, :] * V + gl.arange(0, BV, gl.SliceLayout(1, OF_S))[:, None] + (chunks >> 31)
    gl.store(d_initial + whole_state + at, state)


@gluon.jit
def _bring(q, k, out_keys, do, inverse, scores_t, q_s, k_s, out_s, do_s, t_s, p_s, full, empty, heads, chunks, h, b,
           key_lane, value_lane, C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, CHANNELS: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """All chunks' operands, by a warp that does nothing else."""
    slot, phase = 0, 1
    for i in range(chunks):
        c = chunks - 1 - i
        landed = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(landed, 2 * C * ((3 if CHANNELS else 2) * K + 2 * C + BV))
        bring_tokens(out_keys, b, c * C, key_lane, landed, out_s.index(slot))
        bring_tokens(do, b, c * C, value_lane, landed, do_s.index(slot))
        tma_load(scores_t, [((b * chunks + c) * heads + h) * C, 0], landed, p_s.index(slot))
        bring_tokens(q, b, c * C, key_lane, landed, q_s.index(slot))
        bring_tokens(inverse, b, c * C, h * C, landed, t_s.index(slot))
        if CHANNELS:
            bring_tokens(k, b, c * C, key_lane, landed, k_s.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _take_away(d_states, d_rows, state_s, row_s, state_full, state_empty, row_full, row_empty, heads, chunks, h, b,
               column, C: gl.constexpr, K: gl.constexpr):  # fmt: skip
    """What a chunk gives to memory, by a warp that does nothing else."""
    for i in range(chunks):
        row = (b * chunks + chunks - 1 - i) * heads + h
        mbarrier.wait(state_full, i & 1)
        tma_store(d_states, [row * K, column], state_s)
        tma.store_wait(0)
        mbarrier.arrive(state_empty, count=1)
        mbarrier.wait(row_full, i & 1)
        tma_store(d_rows, [row * C, column], row_s)
        tma.store_wait(0)
        mbarrier.arrive(row_empty, count=1)


@gluon.jit
def delta_reverse_walk(q, k, out_keys, do, inverse, scores_t, d_states, d_rows, decay, steps, norms, ends, last,
                       d_initial, chunks, heads, per_key, scale, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
                       BV: gl.constexpr, CHANNELS: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr,
                       COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """As `_triton_reverse_walk`, without documents, in bfloat16.

    q, k, out_keys, do and inverse are descriptors of [b, tokens, heads x channels] by tiles [1, C, channels], out_keys
    k's without CHANNELS; scores_t and d_rows of rows [b c h C] by [C, channels], d_states of [b c h K] by [K, BV]."""
    gl.static_assert(gl.num_warps() == 4 and BV == 64 and C == 64)
    T: gl.constexpr = gl.bfloat16
    tile, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    k_s = shared_tiles(T, STAGES, C, K)
    q_s = shared_tiles(T, STAGES, C, K)
    if CHANNELS:
        out_s = shared_tiles(T, STAGES, C, K)
    else:
        out_s = k_s
    t_s = shared_tiles(T, STAGES, C, C)
    p_s = shared_tiles(T, STAGES, C, C)
    do_s = shared_tiles(T, STAGES, C, BV)
    state_s = shared_tile(T, K, BV)
    row_s = shared_tile(T, C, BV)
    full, empty = ring(STAGES)
    handed = barriers(4)
    state_full, state_empty, row_full, row_empty = handed.index(0), handed.index(1), handed.index(2), handed.index(3)
    key_lane, value_lane, column = h // per_key * K, h * V + tile * BV, tile * BV
    gl.warp_specialize([
        (_gradients, (k_s, q_s, out_s, t_s, p_s, do_s, state_s, row_s, full, empty, state_full, state_empty, row_full,
                      row_empty, decay, steps, norms, ends, last, d_initial, heads, chunks, scale, h, b, column,
                      C, K, V, BV, CHANNELS, LAST, STAGES)),
        (_bring, (q, k, out_keys, do, inverse, scores_t, q_s, k_s, out_s, do_s, t_s, p_s, full, empty, heads, chunks, h,
                  b, key_lane, value_lane, C, K, BV, CHANNELS, STAGES)),
        (_take_away, (d_states, d_rows, state_s, row_s, state_full, state_empty, row_full, row_empty, heads, chunks, h,
                      b, column, C, K)),
    ], [1, 1], [COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
