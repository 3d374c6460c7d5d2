"""The walk over the chunks of a head on Hopper, in Gluon: the state transposed, in registers, as wgmma's left operand.

What a chunk's GEMMs hand to each other, the state, R and U, are left operands, whose layout is that of a sum of GEMMs:
nothing goes through shared memory between them. Warps have roles. Four walk, and leave the state and R in shared memory
for the four that make o of them; one brings q, k, v, T and P T, a chunk or two ahead. With gates a channel this takes
longer than `_triton_walk`, and has no part in it.
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
def _row_factors(factors, each, first, tokens, C: gl.constexpr):
    """beta, and what multiplies rows of k S, of q S (not read) and of U: [4 C], zeros beyond the last token."""
    place = gl.arange(0, 4 * C, gl.BlockedLayout([2], [32], [4], [0]))
    token = first + place % C
    return gl.load(factors + place // C * each + token, mask=token < tokens, other=0.0)


@gluon.jit
def _keep(states, row, column, state, state_s):
    """A state goes to rows `row` and on of `states`, when what went before has left shared memory."""
    tma.store_wait(0)
    barrier()
    state_s.permute((1, 0)).store(state)
    fence_async_shared()
    barrier()
    tma_store(states, [row, column], state_s)


@gluon.jit
def _states(k_s, v_s, t_s, s_s, r_s, state_s, full, empty, s_full, s_empty, r_full, r_empty, factors, first_state,
            states, last, tokens, heads, chunks, segments, h, b, column,
            C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, EVERY: gl.constexpr,
            FIRST: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """S, chunk by chunk, by one warp group; S and R in bfloat16 for `_outputs`."""
    T: gl.constexpr = gl.bfloat16
    # The state's and the GEMM's that adds to it; those of tiles by tokens; and of their left operands.
    OF_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_C, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, OF_S, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, OF_C)
    rows = gl.allocate_shared_memory(gl.float32, [2, 4 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    each = (gl.num_programs(2) * heads).to(gl.int64) * tokens
    factors += (b * heads + h).to(gl.int64) * tokens
    kept = b * segments * heads + h
    if FIRST:
        once = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(once, count=1)
        fence_async_shared()
        barrier()
        mbarrier.expect(once, 4 * K * BV)
        tma_load(first_state, [(b * heads + h) * K, column], once, state_s)
        mbarrier.wait(once, 0)
        state = state_s.permute((1, 0)).load(OF_S)
        barrier()
    else:
        state = gl.full([BV, K], 0.0, gl.float32, OF_S)
    zero = gl.full([BV, C], 0.0, gl.float32, OF_C)
    rows.index(0).store(_row_factors(factors, each, 0, tokens, C))
    whole_coming = gl.load(factors + 4 * each)
    barrier()
    slot, phase = 0, 0
    for i in range(chunks):
        first = i * C
        mine = rows.index(i & 1)
        coming = _row_factors(factors, each, first + C, tokens, C)
        whole = whole_coming
        whole_coming = gl.load(factors + 4 * each + first + C, mask=first + C < tokens, other=0.0)
        if i % EVERY == 0:
            _keep(states, kept * K, column, state, state_s)
            kept += heads
        entering = state.to(T)
        operand = gl.convert_layout(entering, LEFT_S)
        state = scaled(state, whole)
        mbarrier.wait(full.index(slot), phase)
        ks = warpgroup_mma(operand, k_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(s_empty, (i & 1) ^ 1)
        s_s.store(entering)
        fence_async_shared()
        barrier()
        mbarrier.arrive(s_full, count=1)
        values = v_s.index(slot).permute((1, 0)).load(OF_C).to(gl.float32)
        values = values * mine.slice(0, C).load(TOKEN)[None, :]
        mbarrier.wait(r_empty, (i & 1) ^ 1)
        into_k = mine.slice(C, C).load(TOKEN)[None, :]
        ks = warpgroup_mma_wait(0, deps=[ks])
        rest = (values - ks * into_k).to(T)
        operand = gl.convert_layout(rest, LEFT)
        update = warpgroup_mma(operand, t_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        r_s.store(rest)
        rows.index(1 - (i & 1)).store(coming)
        fence_async_shared()
        barrier()
        mbarrier.arrive(r_full, count=1)
        into_u = mine.slice(3 * C, C).load(TOKEN)[None, :]
        update = warpgroup_mma_wait(0, deps=[update])
        update = gl.convert_layout((update * into_u).to(T), LEFT)
        state = warpgroup_mma(update, k_s.index(slot), state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    _keep(last, (b * heads + h) * K, column, state, state_s)
    tma.store_wait(0)


@gluon.jit
def _outputs(o, s_s, r_s, q_s, p_s, o_s, full, empty, s_full, s_empty, r_full, r_empty, factors, tokens, heads, chunks,
             h, b, value_lane, C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """o of all chunks, by one warp group."""
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    TOKEN: gl.constexpr = gl.SliceLayout(0, OF_C)
    into = factors + 2 * (gl.num_programs(2) * heads).to(gl.int64) * tokens + (b * heads + h).to(gl.int64) * tokens
    zero = gl.full([BV, C], 0.0, gl.float32, OF_C)
    token = gl.arange(0, C, TOKEN)
    slot, phase = 0, 0
    for i in range(chunks):
        into_q = gl.load(into + i * C + token, mask=i * C + token < tokens, other=0.0)
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(s_full, i & 1)
        out = warpgroup_mma(s_s, q_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        barrier()
        mbarrier.arrive(s_empty, count=1)
        out = out * into_q[None, :]
        mbarrier.wait(r_full, i & 1)
        out = warpgroup_mma(r_s, p_s.index(slot).permute((1, 0)), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(r_empty, count=1)
        mbarrier.arrive(empty.index(slot), count=1)
        o_s.permute((1, 0)).store(out.to(o_s.dtype))
        fence_async_shared()
        barrier()
        tma_store(o, [b, i * C, value_lane], o_s.reshape([1, C, BV]))
        slot, phase = next_slot(slot, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def _bring(q, k, v, inverse, mixed, q_s, k_s, v_s, t_s, p_s, full_a, empty_a, full_b, empty_b, chunks,
           b, key_lane, value_lane, square_lane, C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr,
           A_STAGES: gl.constexpr, B_STAGES: gl.constexpr):  # fmt: skip
    """All chunks' operands, by a warp that does nothing else: what the states take (a), and what o takes (b)."""
    a, a_phase, z, z_phase = 0, 1, 0, 1
    for i in range(chunks):
        first = i * C
        mbarrier.wait(empty_a.index(a), a_phase)
        mbarrier.expect(full_a.index(a), 2 * C * (K + BV + C))
        bring_tokens(k, b, first, key_lane, full_a.index(a), k_s.index(a))
        bring_tokens(v, b, first, value_lane, full_a.index(a), v_s.index(a))
        bring_tokens(inverse, b, first, square_lane, full_a.index(a), t_s.index(a))
        mbarrier.wait(empty_b.index(z), z_phase)
        mbarrier.expect(full_b.index(z), 2 * C * (K + C))
        bring_tokens(q, b, first, key_lane, full_b.index(z), q_s.index(z))
        bring_tokens(mixed, b, first, square_lane, full_b.index(z), p_s.index(z))
        a, a_phase = next_slot(a, a_phase, A_STAGES)
        z, z_phase = next_slot(z, z_phase, B_STAGES)


@gluon.jit
def delta_walk(q, k, v, inverse, mixed, o, factors, first_state, states, last, tokens, heads, per_key, chunks, segments,
               C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, EVERY: gl.constexpr,
               FIRST: gl.constexpr, A_STAGES: gl.constexpr, B_STAGES: gl.constexpr, OUTPUT_REGISTERS: gl.constexpr,
               COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """As `_triton_walk.delta_walk`, with a gate a head, without documents, in bfloat16.

    q, k, v, inverse, mixed and o are descriptors of [b, tokens, heads x channels] by tiles [1, C, channels of a
    program], first_state, states and last of rows [... K] by [K, BV]."""
    gl.static_assert(gl.num_warps() == 4 and BV == 64 and C == 64)
    T: gl.constexpr = gl.bfloat16
    tile, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    k_s = shared_tiles(T, A_STAGES, C, K)
    q_s = shared_tiles(T, B_STAGES, C, K)
    v_s = shared_tiles(T, A_STAGES, C, BV)
    t_s = shared_tiles(T, A_STAGES, C, C)
    p_s = shared_tiles(T, B_STAGES, C, C)
    s_s = shared_tile(T, BV, K)
    r_s = shared_tile(T, BV, C)
    o_s = shared_tile(T, C, BV)
    # By way of it all states go to memory: an address for each number would take more registers than there are.
    state_s = shared_tile(gl.float32, K, BV)
    full_a, empty_a = ring(A_STAGES)
    full_b, empty_b = ring(B_STAGES)
    handed = barriers(4)
    s_full, s_empty, r_full, r_empty = handed.index(0), handed.index(1), handed.index(2), handed.index(3)
    key_lane, value_lane, square_lane = h // per_key * K, h * V + tile * BV, h * C
    gl.warp_specialize([
        (_states, (k_s, v_s, t_s, s_s, r_s, state_s, full_a, empty_a, s_full, s_empty, r_full, r_empty, factors,
                   first_state, states, last, tokens, heads, chunks, segments, h, b, tile * BV,
                   C, K, BV, EVERY, FIRST, A_STAGES)),
        (_outputs, (o, s_s, r_s, q_s, p_s, o_s, full_b, empty_b, s_full, s_empty, r_full, r_empty, factors, tokens,
                    heads, chunks, h, b, value_lane, C, BV, B_STAGES)),
        (_bring, (q, k, v, inverse, mixed, q_s, k_s, v_s, t_s, p_s, full_a, empty_a, full_b, empty_b,
                  chunks, b, key_lane, value_lane, square_lane, C, K, BV, A_STAGES, B_STAGES)),
    ], [4, 1], [OUTPUT_REGISTERS, COPY_REGISTERS])  # fmt: skip
