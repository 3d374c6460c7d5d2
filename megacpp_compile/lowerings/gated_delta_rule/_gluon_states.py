"""The states that enter all chunks on Hopper, in Gluon, segments side by side: as `_triton_states`, gates a head.

As in `_gluon_walk`, the state is transposed, in registers, as wgmma's left operand, and so is what GEMMs hand to each
other. Shared memory holds what TMA brings, two chunks ahead, and what it takes away; there is room for two programs.
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
    scaled,
    seen_as,
    shared_tile,
    shared_tiles,
    tma_load,
    tma_store,
)


@gluon.jit
def _row_factors(decay, norms, steps, row, whole, there, C: gl.constexpr):
    """What multiplies rows of k S, and of the errors on their way to the state: [2 C]."""
    place = gl.arange(0, 2 * C, gl.BlockedLayout([1], [32], [4], [0]))
    token, written = place % C, place >= C
    there = (place >= 0) & there
    total = gl.load(decay + row * C + token, mask=there, other=0.0)
    norm = gl.load(norms + (2 * row + 1) * C + token, mask=there, other=0.0)
    step = gl.load(steps + row * C + token, mask=there & written, other=1.0)
    return norm * step * gl.exp2(gl.where(written, whole - total, total))


@gluon.jit
def _bring(k, v, solve, b, c, row, slot, k_s, v_s, t_s, full, key_lane, value_lane):
    """The operands of chunk `c`, number `row`."""
    C: gl.constexpr = t_s.shape[1]
    mbarrier.expect(full.index(slot), 2 * C * (k_s.shape[2] + v_s.shape[2] + C))
    bring_tokens(k, b, c * C, key_lane, full.index(slot), k_s.index(slot))
    bring_tokens(v, b, c * C, value_lane, full.index(slot), v_s.index(slot))
    tma_load(solve, [row * C, 0], full.index(slot), t_s.index(slot))


@gluon.jit
def delta_states(k, v, solve, kept, states, errors, decay, steps, norms, chunks, heads, per_key, segments,
                 EVERY: gl.constexpr, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
                 STAGES: gl.constexpr):  # fmt: skip
    """States [b, c, h, K, V] and errors F [b, c, h, C, V] of a segment, from `kept`, the state that enters it.

    k and v are descriptors of [b, tokens, heads x channels] by tiles [1, C, channels of a program], solve and errors of
    rows [b c h C] by [C, .], kept and states of [b . h K] by [K, BV]."""
    gl.static_assert(gl.num_warps() == 4 and BV == 64 and C == 64)
    T: gl.constexpr = gl.bfloat16
    OF_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_C, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, OF_S, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, OF_C)
    segment, h, tile, b = gl.program_id(0) % segments, gl.program_id(0) // segments, gl.program_id(1), gl.program_id(2)
    k_s = shared_tiles(T, STAGES, C, K)
    v_s = shared_tiles(T, STAGES, C, BV)
    t_s = shared_tiles(T, STAGES, C, C)
    kept_s = shared_tile(gl.float32, K, BV)
    error_s = shared_tile(T, C, BV)
    rows = gl.allocate_shared_memory(gl.float32, [2, 2 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = barriers(STAGES + 1)
    column, key_lane, value_lane = tile * BV, h // per_key * K, h * V + tile * BV
    c = segment * EVERY
    count = gl.minimum(EVERY, chunks - c)
    row = (b * chunks + c) * heads + h
    once = full.index(STAGES)
    mbarrier.expect(once, 4 * K * BV)
    tma_load(kept, [((b * segments + segment) * heads + h) * K, column], once, kept_s)
    for slot in gl.static_range(STAGES):
        if slot < count:
            _bring(k, v, solve, b, c + slot, row + slot * heads, slot, k_s, v_s, t_s, full, key_lane, value_lane)
    whole = gl.load(decay + row * C + C - 1)
    rows.index(0).store(_row_factors(decay, norms, steps, row, whole, count > 0, C))
    mbarrier.wait(once, 0)
    state = kept_s.permute((1, 0)).load(OF_S)
    state_s = seen_as(kept_s, T, K, BV, gl.NVMMASharedLayout.get_default_for([K, BV], T))
    zero = gl.full([BV, C], 0.0, gl.float32, OF_C)
    barrier()
    slot, phase = 0, 0
    for i in range(count):
        mine = rows.index(i & 1)
        whole_coming = gl.load(decay + (row + heads) * C + C - 1, mask=i + 1 < count, other=0.0)
        coming = _row_factors(decay, norms, steps, row + heads, whole_coming, i + 1 < count, C)
        entering = state.to(T)
        operand = gl.convert_layout(entering, LEFT_S)
        state = scaled(state, gl.exp2(whole))
        mbarrier.wait(full.index(slot), phase)
        d = warpgroup_mma(operand, k_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        tma.store_wait(0)
        barrier()
        state_s.permute((1, 0)).store(entering)
        rows.index(1 - (i & 1)).store(coming)
        fence_async_shared()
        barrier()
        tma_store(states, [row * K, column], state_s)
        d = warpgroup_mma_wait(0, deps=[d])
        values = v_s.index(slot).permute((1, 0)).load(OF_C).to(gl.float32)
        rest = values - d * mine.slice(0, C).load(TOKEN)[None, :]
        rest = gl.convert_layout(rest.to(T), LEFT)
        d = warpgroup_mma(rest, t_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        into = mine.slice(C, C).load(TOKEN)[None, :]
        d = warpgroup_mma_wait(0, deps=[d])
        update = gl.convert_layout((d * into).to(T), LEFT)
        state = warpgroup_mma(update, k_s.index(slot), state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
        # Stored while that GEMM is under way, the errors make ptxas 12.8 stop with a segmentation fault.
        error_s.permute((1, 0)).store(d.to(T))
        fence_async_shared()
        barrier()
        tma_store(errors, [row * C, column], error_s)
        if i + STAGES < count:
            coming_row = row + STAGES * heads
            _bring(k, v, solve, b, c + i + STAGES, coming_row, slot, k_s, v_s, t_s, full, key_lane, value_lane)
        row += heads
        whole = whole_coming
        slot, phase = next_slot(slot, phase, STAGES)
    tma.store_wait(0)
