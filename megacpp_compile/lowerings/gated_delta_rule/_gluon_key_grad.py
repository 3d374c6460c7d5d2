"""Gradients of k, v, the gates and beta on Hopper, in Gluon, chunks side by side: as `_triton_gradients`' other two.

As in `_gluon_query_grad`, two programs of a multiprocessor take turns to multiply; and one reads each tile once, where
Triton's kernel for all of it has not the registers.
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
    added,
    barrier,
    barriers,
    bring_rows,
    bring_tokens,
    column_sums,
    product,
    put_tokens,
    row_sum,
    seen_as,
    shared_tiles,
    tma_load,
    tma_store,
)
from megacpp_compile.lowerings.gated_delta_rule._gluon_tiles import through_norm, value_grad


@gluon.jit
def _bring_written(d_rows, errors, states, row, landed, row_s, error_s, state_s):
    """What of a value head the gradients of keys and values are made of; its chunk is number `row`."""
    C: gl.constexpr = row_s.shape[0]
    V: gl.constexpr = row_s.shape[1]
    K: gl.constexpr = state_s.shape[0]
    mbarrier.expect(landed.index(1), 4 * C * V)
    tma_load(d_rows, [row * C, 0], landed.index(1), row_s)
    tma_load(errors, [row * C, 0], landed.index(1), error_s)
    bring_rows(states, row * K, landed.index(2), state_s)


@gluon.jit
def delta_key_grad(q, k, errors, d_rows, states, d_states, d_scores, dk, dv, decay, steps, norms, d_decay, dg, dbeta,
                   tokens, chunks, heads, key_heads, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
                   HB: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr):  # fmt: skip
    """dv = beta dR and dbeta = <dR, F>; dk, summed over the HB value heads of a key head; and dg, the sum from behind
    of all that the decays are due.

    q, k, dk, dv are descriptors of [b, tokens, heads x channels] by tiles [1, C, channels]; errors, d_rows, d_scores of
    rows [b c h C] by [C, .], states and d_states of [b c h K] by [K, V].
    """
    gl.static_assert(gl.num_warps() == 4 and C == 64 and K == 128 and V == 128)
    T: gl.constexpr = gl.bfloat16
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    TOKEN: gl.constexpr = gl.SliceLayout(1, OF_K)
    READER: gl.constexpr = gl.SliceLayout(1, OF_C)
    WRITER: gl.constexpr = gl.SliceLayout(0, OF_C)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], T)
    c, group, b = gl.program_id(0) % chunks, gl.program_id(0) // chunks, gl.program_id(1)
    keys_at = shared_tiles(T, 1, C, K)
    row_s_at = shared_tiles(T, 1, C, V)
    error_s_at = shared_tiles(T, 1, C, V)
    state_s_at = shared_tiles(T, 1, K, V)
    d_state_s_at = shared_tiles(T, 1, K, V)
    keys, row_s, error_s, state_s = keys_at.index(0), row_s_at.index(0), error_s_at.index(0), state_s_at.index(0)
    landed = barriers(4)
    first, block = c * C, (b * chunks + c) * heads + group * HB
    mbarrier.expect(landed.index(0), 2 * C * K)
    bring_tokens(k, b, first, group * K, landed.index(0), keys)
    _bring_written(d_rows, errors, states, block, landed, row_s, error_s, state_s)
    bring_rows(d_states, block * K, landed.index(3), d_state_s_at.index(0))
    summed = gl.full([C, C], 0.0, gl.float32, OF_C)
    mbarrier.wait(landed.index(0), 0)
    for i in gl.static_range(HB):
        row, h, phase = block + i, group * HB + i, i & 1
        # 0, which no compiler knows: addresses are made where they are used, and take no registers in between.
        zero = i * (chunks >> 31)
        keys, row_s, error_s = keys_at.index(zero), row_s_at.index(zero), error_s_at.index(zero)
        state_s, d_state_s = state_s_at.index(zero), d_state_s_at.index(zero)
        # Between heads the sum is where the last tile will come: beside pairs of tokens it has no registers.
        out_s = seen_as(d_state_s, gl.float32, C, K, gl.NVMMASharedLayout.get_default_for([C, K], gl.float32))
        token, reader, writer = (gl.arange(0, C, TOKEN) + zero, gl.arange(0, C, READER) + zero,
                                 gl.arange(0, C, WRITER) + zero)
        of_k = gl.load(norms + (row * 2 + 1) * C + token)
        total, step = gl.load(decay + row * C + token), gl.load(steps + row * C + token)
        whole = gl.load(decay + row * C + C - 1)
        mbarrier.wait(landed.index(1), phase)
        pairs = product(row_s, error_s.permute((1, 0)), C)
        decays, betas = decay + row * C, steps + row * C
        apart = gl.load(decays + reader)[:, None] - gl.load(decays + writer)[None, :]
        apart = gl.exp2(gl.where(reader[:, None] > writer[None, :], apart, float("-inf")))
        apart = apart * (0.0 - gl.load(betas + reader))[:, None] * gl.load(betas + writer)[None, :]
        pairs = warpgroup_mma_wait(0, deps=[pairs])
        pairs = pairs * apart
        summed = added(summed, pairs)
        d_total = gl.full([C], 0.0, gl.float32, TOKEN)
        if GATED:
            between = warpgroup_mma_wait(0, deps=[product(keys, keys.permute((1, 0)), C)])
            of_row = norms + (row * 2 + 1) * C
            pairs = pairs * between * gl.load(of_row + reader)[:, None] * gl.load(of_row + writer)[None, :]
            d_total += gl.convert_layout(gl.sum(pairs, 1), TOKEN) - gl.convert_layout(column_sums(pairs), TOKEN)
        barrier()
        value_grad(row_s, error_s, steps + row * C, dbeta + (b * tokens + first).to(gl.int64) * heads + h, heads,
                   tokens - first, BETA)
        if i > 0:
            out = out_s.load(OF_K)
        fence_async_shared()
        barrier()
        if i > 0:
            bring_rows(d_states, row * K, landed.index(3), d_state_s)
        tma_store(dv, [b, first, h * V], row_s.reshape([1, C, V]))
        mbarrier.wait(landed.index(2), phase)
        d = product(row_s, state_s.permute((1, 0)), K)
        d = warpgroup_mma_wait(0, deps=[d])
        d = d * (0.0 - gl.exp2(total))[:, None]
        d_total += row_sum(d, keys) * of_k
        if i > 0:
            out = added(out, d)
        else:
            out = d
        mbarrier.wait(landed.index(3), phase)
        d = product(error_s, d_state_s.permute((1, 0)), K)
        inner = gl.full([16], 0.0, gl.float32, gl.SliceLayout(1, ROWS))
        if GATED:
            for part in gl.static_range(K // 16):
                state = state_s.slice(part * 16, 16).load(ROWS).to(gl.float32)
                inner += gl.sum(state * d_state_s.slice(part * 16, 16).load(ROWS).to(gl.float32), 1)
        d = warpgroup_mma_wait(0, deps=[d])
        tma.store_wait(0)
        barrier()
        if i + 1 < HB:
            _bring_written(d_rows, errors, states, row + 1, landed, row_s, error_s, state_s)
        else:  # queries and the gradient of scores, where a head's tiles have been
            mbarrier.expect(landed.index(1), 2 * C * (K + C))
            bring_tokens(q, b, first, group * K, landed.index(1), row_s)
            scores = ((b * chunks + c) * key_heads + group) * C
            tma_load(d_scores, [scores, 0], landed.index(1), seen_as(error_s, T, C, C, PAIRS))
        d = d * (gl.exp2(whole - total) * step)[:, None]
        if i + 1 < HB:
            out_s.store(out + d)
        else:
            out = added(out, d)
        if GATED:
            from_end = row_sum(d, keys) * of_k
            parts = d_decay + row * 2 * C + token
            d_total += gl.load(parts) + gl.load(parts + C) - from_end
            at_end = gl.sum(inner, 0) * gl.exp2(whole) + gl.sum(from_end, 0)
            behind = gl.convert_layout(d_total, WRITER)
            behind = gl.sum(gl.where(reader[:, None] <= writer[None, :], behind[None, :], 0.0), 1) + at_end
            to = (b * tokens + first + reader).to(gl.int64) * heads + h
            gl.store(dg + to, behind.to(dg.dtype.element_ty), mask=first + reader < tokens)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_K, 2)
    transposed = seen_as(state_s, T, C, C, PAIRS)
    of_row = norms + (block * 2 + 1) * C
    reader, writer = gl.arange(0, C, READER), gl.arange(0, C, WRITER)
    transposed.store((summed * gl.load(of_row + reader)[:, None]).to(T))
    fence_async_shared()
    barrier()
    summed = gl.convert_layout((summed * gl.load(of_row + writer)[None, :]).to(T), LEFT)
    out = warpgroup_mma(summed, keys, out, is_async=True)
    out = warpgroup_mma(transposed.permute((1, 0)), keys, out, is_async=True)
    mbarrier.wait(landed.index(1), HB & 1)
    out = warpgroup_mma(seen_as(error_s, T, C, C, PAIRS).permute((1, 0)), row_s, out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    out = through_norm(out, keys, gl.load(of_row + gl.arange(0, C, TOKEN)), NORM)
    put_tokens(keys, out, dk, b, first, group * K)
    tma.store_wait(0)
