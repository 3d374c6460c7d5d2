"""The gradient of q on Hopper, in Gluon, chunks side by side: as `_triton_gradients.query_grad`.

There a program waits for one tile after the other, each by way of registers. Here TMA brings all tiles of a value head
at once to where tensor cores read them, and two programs of a multiprocessor take turns: one multiplies while the
other's tiles are on their way.
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
    shared_tile,
    tma_load,
    tma_store,
)
from megacpp_compile.lowerings.gated_delta_rule._gluon_tiles import through_norm

# Parts of the decays' gradient that this kernel leaves for the next, per token: from P, and from queries' reading.
PARTS = 2


@gluon.jit
def _bring_read(do, errors, states, b, first, h, row, landed, grad_s, error_s, state_s):
    """The output's gradient and the errors, and the state, of value head `h`, whose chunk is number `row`."""
    C: gl.constexpr = grad_s.shape[0]
    V: gl.constexpr = grad_s.shape[1]
    K: gl.constexpr = state_s.shape[0]
    mbarrier.expect(landed.index(1), 4 * C * V)
    bring_tokens(do, b, first, h * V, landed.index(1), grad_s)
    tma_load(errors, [row * C, 0], landed.index(1), error_s)
    bring_rows(states, row * K, landed.index(2), state_s)


@gluon.jit
def delta_query_grad(q, k, do, errors, states, dq, d_scores, decay, steps, norms, d_decay, chunks, heads, key_heads,
                     scale, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HB: gl.constexpr,
                     NORM: gl.constexpr):  # fmt: skip
    """dq, summed over the HB value heads of a key head; the gradient of the scores q k^T, summed likewise and times
    q's norm, for dk; and two parts of the decays' gradient. Descriptors as `delta_key_grad`."""
    gl.static_assert(gl.num_warps() == 4 and C == 64 and K == 128 and V == 128)
    T: gl.constexpr = gl.bfloat16
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    OF_C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    TOKEN: gl.constexpr = gl.SliceLayout(1, OF_K)
    READER: gl.constexpr = gl.SliceLayout(1, OF_C)
    WRITER: gl.constexpr = gl.SliceLayout(0, OF_C)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], T)
    c, group, b = gl.program_id(0) % chunks, gl.program_id(0) // chunks, gl.program_id(1)
    queries = shared_tile(T, C, K)
    keys = shared_tile(T, C, K)
    grad_s = shared_tile(T, C, V)
    error_s = shared_tile(T, C, V)
    state_s = shared_tile(T, K, V)
    landed = barriers(3)
    first, block = c * C, (b * chunks + c) * heads + group * HB
    mbarrier.expect(landed.index(0), 4 * C * K)
    bring_tokens(q, b, first, group * K, landed.index(0), queries)
    bring_tokens(k, b, first, group * K, landed.index(0), keys)
    _bring_read(do, errors, states, b, first, group * HB, block, landed, grad_s, error_s, state_s)
    token = gl.arange(0, C, TOKEN)
    reader, writer = gl.arange(0, C, READER), gl.arange(0, C, WRITER)
    of_q, of_k = gl.load(norms + block * 2 * C + reader), gl.load(norms + (block * 2 + 1) * C + writer)
    q_norm = gl.convert_layout(of_q, TOKEN)
    out = gl.full([C, K], 0.0, gl.float32, OF_K)
    summed = gl.full([C, C], 0.0, gl.float32, OF_C)
    mbarrier.wait(landed.index(0), 0)
    for i in range(HB):
        row, phase = block + i, i & 1
        total, step = gl.load(decay + row * C + token), gl.load(steps + row * C + writer) * scale
        t_reader, t_writer = gl.convert_layout(total, READER), gl.convert_layout(total, WRITER)
        apart = gl.where(reader[:, None] >= writer[None, :], t_reader[:, None] - t_writer[None, :], float("-inf"))
        apart = gl.exp2(apart) * step[None, :]
        mbarrier.wait(landed.index(1), phase)
        d = warpgroup_mma_wait(0, deps=[product(grad_s, error_s.permute((1, 0)), C)])
        d = d * apart
        summed = added(summed, d)
        scores = warpgroup_mma_wait(0, deps=[product(queries, keys.permute((1, 0)), C)])
        # Nothing decays from a token to itself.
        d = gl.where(reader[:, None] > writer[None, :], d * scores * of_q[:, None] * of_k[None, :], 0.0)
        part = gl.convert_layout(gl.sum(d, 1), TOKEN) - gl.convert_layout(column_sums(d), TOKEN)
        gl.store(d_decay + row * 2 * C + token, part)
        mbarrier.wait(landed.index(2), phase)
        d = warpgroup_mma_wait(0, deps=[product(grad_s, state_s.permute((1, 0)), K)])
        barrier()
        if i + 1 < HB:
            _bring_read(do, errors, states, b, first, group * HB + i + 1, row + 1, landed, grad_s, error_s, state_s)
        d = d * (gl.exp2(total) * scale)[:, None]
        gl.store(d_decay + (row * 2 + 1) * C + token, row_sum(d, queries) * q_norm)
        out = added(out, d)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_K, 2)
    out = warpgroup_mma(gl.convert_layout((summed * of_k[None, :]).to(T), LEFT), keys, out, is_async=True)
    scores_s = seen_as(error_s, T, C, C, PAIRS)
    scores_s.store((summed * of_q[:, None]).to(T))
    fence_async_shared()
    barrier()
    tma_store(d_scores, [((b * chunks + c) * key_heads + group) * C, 0], scores_s)
    out = warpgroup_mma_wait(0, deps=[out])
    out = through_norm(out, queries, q_norm, NORM)
    put_tokens(queries, out, dq, b, first, group * K)
    tma.store_wait(0)
