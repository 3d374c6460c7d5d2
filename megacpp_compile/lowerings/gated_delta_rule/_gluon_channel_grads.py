"""All gradients of a chunk of small decay of gates a channel on Hopper, in Gluon: one program a chunk of a head.

As `_triton_small_decay_gradients`, whose four kernels leave one another 0.8 GB of float32 (8192 tokens, 32 heads). Here
every tile is read once, and gates are added up by GEMMs of ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from megacpp_compile.lowerings._kernels.gluon_tiles import (
    added,
    barrier,
    barriers,
    bring_rows,
    bring_tokens,
    multiplied,
    power,
    product,
    put_tokens,
    seen_as,
    shared_tile,
    shared_tiles,
    tma_load,
    tma_store,
)
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._gluon_tiles import (
    put_ones,
    summed,
    through_norm,
    unit_rows,
    value_grad,
)


@gluon.jit
def _put(rows, tile, out, b, first, h, tokens, heads, WHOLE: gl.constexpr):
    """A tile of a value head to `out`: WHOLE, a descriptor, or float32 to be summed over the heads of a key head."""
    C: gl.constexpr = tile.shape[0]
    K: gl.constexpr = tile.shape[1]
    if WHOLE:
        put_tokens(rows, tile, out, b, first, h * K)
    else:
        token = gl.arange(0, C, gl.SliceLayout(1, tile.type.layout))
        lane = gl.arange(0, K, gl.SliceLayout(0, tile.type.layout))
        at = ((b * tokens + first + token).to(gl.int64) * heads + h) * K
        gl.store(out + at[:, None] + lane[None, :], tile, mask=(first + token < tokens)[:, None])


@gluon.jit
def delta_channel_grads(queries, keys, out_keys, q, k, do, errors, d_rows, states, d_states, dq, dk, dv, g, dg, steps,
                        small_decay, d_between, dbeta, tokens, chunks, heads, per_key, scale, eps,
                        C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr,
                        NORM: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """dv = beta dR and dbeta = <dR, F>; of a chunk of small decay what a value head gives to dq and dk, and dg, and of
    any other d_between [b, c, h, C, C], the gradient of A, which its kernels read.

    Descriptors of [b, tokens, heads x channels] by [1, C, channels]: queries, keys, out_keys, q, k, do, dv, g and dg of
    GATE, and, WHOLE, dq and dk, which are float32 [b, tokens, heads, K] otherwise; of rows [b c h C] by [C, .]: errors
    and d_rows; of [b c h K] by [K, V]: states and d_states.
    """
    gl.static_assert(gl.num_warps() % 4 == 0 and C == 64 and K == 128 and V == 128)
    T: gl.constexpr = gl.bfloat16
    GROUPS: gl.constexpr = gl.num_warps() // 4
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, K // GROUPS, 16])
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])
    TOKEN: gl.constexpr = gl.SliceLayout(1, OF_K)
    LANE: gl.constexpr = gl.SliceLayout(0, OF_K)
    READER: gl.constexpr = gl.SliceLayout(1, OF_C)
    WRITER: gl.constexpr = gl.SliceLayout(0, OF_C)
    CHANNEL: gl.constexpr = gl.BlockedLayout([1, V // GROUPS], [32, 1], [4, GROUPS], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], T)
    c, h, b = gl.program_id(0) % chunks, gl.program_id(0) // chunks, gl.program_id(1)
    row, first, key_lane = (b * chunks + c) * heads + h, c * C, h // per_key * K
    is_small_decay = gl.load(small_decay + row) != 0
    row_s = shared_tile(T, C, V)
    error_s = shared_tile(T, C, V)
    do_s = shared_tile(T, C, V)
    out_s = shared_tile(T, C, K)
    query_s = shared_tile(T, C, K)
    key_s = shared_tile(T, C, K)
    q_s = shared_tile(T, C, K)
    k_s = shared_tile(T, C, K)
    state_s = shared_tile(T, K, V)
    d_state_s = shared_tile(T, K, V)
    # Gates, then two parts of a sum, then pairs of tokens; the same for the gates' gradient.
    parts = shared_tiles(T, 2, C, K)
    part_s, rest_s = parts.index(0), parts.index(1)
    gate_s = seen_as(parts, GATE, C, K, gl.NVMMASharedLayout.get_default_for([C, K], GATE))
    landed = barriers(6)
    mbarrier.expect(landed.index(0), 4 * C * V)
    tma_load(d_rows, [row * C, 0], landed.index(0), row_s)
    tma_load(errors, [row * C, 0], landed.index(0), error_s)
    if is_small_decay:
        mbarrier.expect(landed.index(1), C * K * GATE.primitive_bitwidth // 8)
        bring_tokens(g, b, first, h * K, landed.index(1), gate_s)
        mbarrier.expect(landed.index(2), 2 * C * V)
        bring_tokens(do, b, first, h * V, landed.index(2), do_s)
        bring_rows(states, row * K, landed.index(3), state_s)
        mbarrier.expect(landed.index(4), 10 * C * K)
        bring_tokens(out_keys, b, first, h * K, landed.index(4), out_s)
        bring_tokens(queries, b, first, h * K, landed.index(4), query_s)
        bring_tokens(q, b, first, key_lane, landed.index(4), q_s)
        bring_tokens(k, b, first, key_lane, landed.index(4), k_s)
        bring_tokens(keys, b, first, h * K, landed.index(4), key_s)
    reader, writer, token = gl.arange(0, C, READER), gl.arange(0, C, WRITER), gl.arange(0, C, TOKEN)
    steps += row * C
    step = gl.load(steps + writer)
    mbarrier.wait(landed.index(0), 0)
    between = warpgroup_mma_wait(0, deps=[product(row_s, error_s.permute((1, 0)), C)])
    between = between * (0.0 - gl.load(steps + reader))[:, None] * step[None, :]
    barrier()
    dbeta += (b * tokens + first).to(gl.int64) * heads + h
    value_grad(row_s, error_s, steps, dbeta, heads, tokens - first, BETA)
    fence_async_shared()
    barrier()
    tma_store(dv, [b, first, h * V], row_s.reshape([1, C, V]))
    if not is_small_decay:
        gl.store(d_between + row.to(gl.int64) * C * C + reader[:, None] * C + writer[None, :], between.to(T))
    else:
        # G - G_m of a token.
        mbarrier.wait(landed.index(1), 0)
        gate = gate_s.load(OF_K).to(gl.float32) * LOG2_E
        barrier()
        ones = seen_as(d_state_s, T, C, C, PAIRS)
        put_ones(ones, "middle")
        apart = summed(ones, gate, part_s, rest_s)
        barrier()
        bring_rows(d_states, row * K, landed.index(5), d_state_s)
        between_s, scores_s = seen_as(part_s, T, C, C, PAIRS), seen_as(rest_s, T, C, C, PAIRS)
        between_s.store(gl.where(reader[:, None] > writer[None, :], between, 0.0).to(T))
        mbarrier.wait(landed.index(2), 0)
        scores = warpgroup_mma_wait(0, deps=[product(do_s, error_s.permute((1, 0)), C)])
        scores = scores * (step * scale)[None, :]
        diagonal = gl.sum(gl.where(reader[:, None] == writer[None, :], scores, 0.0), 1)
        diagonal = gl.convert_layout(diagonal, TOKEN)
        scores_s.store(gl.where(reader[:, None] > writer[None, :], scores, 0.0).to(T))
        fence_async_shared()
        barrier()
        mbarrier.wait(landed.index(3), 0)
        d = warpgroup_mma_wait(0, deps=[product(do_s, state_s.permute((1, 0)), K)])
        mbarrier.wait(landed.index(4), 0)
        d = multiplied(scores_s, out_s, d * scale)
        gate = query_s.load(OF_K).to(gl.float32) * d
        key, of_k = unit_rows(k_s, eps, OF_K, NORM)
        d = d * power(apart) + diagonal[:, None] * key
        _, of_q = unit_rows(q_s, eps, OF_K, NORM)
        d = through_norm(d, q_s, of_q, NORM)
        _put(do_s, d, dq, b, first, h, tokens, heads, WHOLE)
        d = warpgroup_mma_wait(0, deps=[product(row_s, state_s.permute((1, 0)), K)])
        d = multiplied(between_s, out_s, 0.0 - d)
        gate = added(gate, key_s.load(OF_K).to(gl.float32) * d)
        grad = d * power(apart)
        mbarrier.wait(landed.index(5), 0)
        d = product(error_s, d_state_s.permute((1, 0)), K)
        inner = gl.sum(state_s.load(CHANNEL).to(gl.float32) * d_state_s.load(CHANNEL).to(gl.float32), 1)
        d = warpgroup_mma_wait(0, deps=[d])
        d = d * gl.load(steps + token)[:, None]
        end = gl.convert_layout(inner, LANE) + gl.sum(out_s.load(OF_K).to(gl.float32) * d, 0)
        # What the whole decay is due, every token's gate is: the last row is behind all.
        gate = added(gate, gl.where((token == C - 1)[:, None], end[None, :], 0.0))
        d = multiplied(scores_s.permute((1, 0)), query_s, d)
        d = multiplied(between_s.permute((1, 0)), key_s, d)
        gate = added(gate, out_s.load(OF_K).to(gl.float32) * (0.0 - d))
        grad = added(grad, d * power(0.0 - apart))
        grad = grad + q_s.load(OF_K).to(gl.float32) * (diagonal * of_q)[:, None]
        grad = through_norm(grad, k_s, of_k, NORM)
        tma.store_wait(0)
        _put(row_s, grad, dk, b, first, h, tokens, heads, WHOLE)
        barrier()
        ones = seen_as(query_s, T, C, C, PAIRS)
        put_ones(ones, "behind")
        put_tokens(gate_s, summed(ones, gate, part_s, rest_s), dg, b, first, h * K)
    tma.store_wait(0)
