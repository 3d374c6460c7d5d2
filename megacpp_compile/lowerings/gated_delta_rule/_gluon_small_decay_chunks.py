"""Which chunks of gates a channel are of small decay, and their rows with the gates inside, on Hopper in Gluon.

In `_triton_small_decay` a warp walks through the rows of a chunk and reads the gates twice; here TMA brings a chunk's
tiles once, and two programs of a multiprocessor take turns.
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
    barrier,
    barriers,
    bring_tokens,
    product,
    put_tokens,
    seen_as,
    shared_tile,
    shared_tiles,
)
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.gated_delta_rule._gluon_tiles import put_ones, summed, unit_rows
from megacpp_compile.lowerings.gated_delta_rule._triton_small_decay import MOST


@gluon.jit
def delta_small_decay_chunks_hopper(q, k, g, queries, keys, out_keys, small_decay, dots, ends, tokens, chunks, heads,
                                    per_key, eps,
                             C: gl.constexpr, K: gl.constexpr, GATE: gl.constexpr, NORM: gl.constexpr):  # fmt: skip
    """As `_triton_small_decay.delta_small_decay_chunks`, without documents, in bfloat16. q, k, g of GATE, queries, keys
    and out_keys are descriptors of [b, tokens, heads x channels] by tiles [1, C, K]."""
    gl.static_assert(gl.num_warps() % 4 == 0 and C == 64 and K == 128)
    T: gl.constexpr = gl.bfloat16
    GROUPS: gl.constexpr = gl.num_warps() // 4
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, K // GROUPS, 16])
    LANE: gl.constexpr = gl.SliceLayout(0, OF_K)
    TOKEN: gl.constexpr = gl.SliceLayout(1, OF_K)
    c, h, b = gl.program_id(0) % chunks, gl.program_id(0) // chunks, gl.program_id(1)
    row, first, key_lane = (b * chunks + c) * heads + h, c * C, h // per_key * K
    q_s = shared_tile(T, C, K)
    k_s = shared_tile(T, C, K)
    parts = shared_tiles(T, 2, C, K)
    gate_s = seen_as(parts, GATE, C, K, gl.NVMMASharedLayout.get_default_for([C, K], GATE))
    landed = barriers(2)
    mbarrier.expect(landed.index(0), C * K * GATE.primitive_bitwidth // 8)
    bring_tokens(g, b, first, h * K, landed.index(0), gate_s)
    mbarrier.wait(landed.index(0), 0)
    gate = gate_s.load(OF_K).to(gl.float32) * LOG2_E
    ones = seen_as(k_s, T, C, C, gl.NVMMASharedLayout.get_default_for([C, C], T))
    part_s, rest_s = parts.index(0), parts.index(1)
    barrier()
    put_ones(ones, "halves")
    part_s.store(gl.abs(gate).to(T))
    fence_async_shared()
    barrier()
    is_small_decay = gl.max(gl.max(warpgroup_mma_wait(0, deps=[product(ones, part_s, K)]), 0), 0) <= MOST
    gl.store(small_decay + row, is_small_decay.to(gl.int32))
    barrier()
    if is_small_decay:
        mbarrier.expect(landed.index(1), 4 * C * K)
        bring_tokens(q, b, first, key_lane, landed.index(1), q_s)
        put_ones(ones, "middle")
        apart = summed(ones, gate, part_s, rest_s)
        token, lane = gl.arange(0, C, TOKEN), gl.arange(0, K, LANE)
        to = ends + row * 3 * K + lane[None, :] + token[:, None] * 0
        gl.store(to, gl.full([C, K], 0.0, gl.float32, OF_K), mask=(token == 0)[:, None])
        gl.store(to + K, gate - apart, mask=(token == 0)[:, None])
        gl.store(to + 2 * K, apart, mask=(token == C - 1)[:, None])
        barrier()
        bring_tokens(k, b, first, key_lane, landed.index(1), k_s)
        mbarrier.wait(landed.index(1), 0)
        query, _ = unit_rows(q_s, eps, OF_K, NORM)
        key, _ = unit_rows(k_s, eps, OF_K, NORM)
        at = (b * tokens + first + token).to(gl.int64) * heads + h
        gl.store(dots + at, gl.sum(query * key, 1), mask=first + token < tokens)
        reads = gl.exp2(apart)
        put_tokens(q_s, query * reads, queries, b, first, h * K)
        put_tokens(k_s, key * reads, keys, b, first, h * K)
        put_tokens(part_s, key * gl.exp2(0.0 - apart), out_keys, b, first, h * K)
        tma.store_wait(0)
