"""`mla_decode` on Hopper in Gluon for few queries, up to N, 16 or 32, over rows in bfloat16.

It computes S^T and O^T, so that wgmma's M = 64 is rows of keys or channels, and N is the few queries: nothing is
padded, and a tile that has been brought is read from shared memory once for each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from megacpp_compile.lowerings._kernels.gluon_tiles import barrier, load_async, shared_tile, shared_tiles
from megacpp_compile.lowerings._kernels.triton_math import LOG2_E
from megacpp_compile.lowerings.mla_decode._gluon_rows import PLAIN, log2, part, queries


@gluon.jit
def _copy(kv, kv_s, row, there, first, to, LANES: gl.constexpr, L: gl.constexpr):
    lane = first + gl.arange(0, LANES, gl.SliceLayout(0, L))
    at = (kv + row.to(gl.int64) * kv_s)[:, None] + lane[None, :]
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
    load_async(to, at, mask=there[:, None] & (lane >= 0)[None, :])


@gluon.jit
def _copy_tile(kv, kv_s, first, end, k_v, k_r, V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr):
    W: gl.constexpr = gl.num_warps()
    L_V: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    L_R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    row = first + gl.arange(0, BK, gl.SliceLayout(1, L_V))
    _copy(kv, kv_s, row, row < end, 0, k_v, V, L_V)
    row = first + gl.arange(0, BK, gl.SliceLayout(1, L_R))
    _copy(kv, kv_s, row, row < end, V, k_r, R, L_R)
    async_copy.commit_group()


@gluon.jit
def mla_decode_few(q, kv, lengths, part_out, part_lse, tokens, rows, heads, splits, scale,
                   q_b, q_t, q_h, kv_b, kv_s, l_b, V: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
                   BK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One warp group: a part of a sequence's rows, and N of its queries. STAGES tiles are on their way or in use."""
    gl.static_assert(gl.num_warps() == 4 and BK == 64)
    T: gl.constexpr = q.dtype.element_ty
    b = gl.program_id(2).to(gl.int64)
    length, start, end = part(lengths, b, rows, splits, l_b, BK)
    kv += b * kv_b
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    QUERY: gl.constexpr = gl.SliceLayout(0, M)
    k_v = shared_tiles(T, STAGES, BK, V)
    k_r = shared_tiles(T, STAGES, BK, R)
    q_v = shared_tile(T, N, V)
    q_r = shared_tile(T, N, R)
    p = shared_tile(T, BK, N)

    for stage in gl.static_range(STAGES):
        _copy_tile(kv, kv_s, start + stage * BK, end, k_v.index(stage), k_r.index(stage), V, R, BK)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    m = gl.program_id(0) * N + gl.arange(0, N, gl.SliceLayout(1, L))
    mine = m < tokens * heads
    at = q + b * q_b + (m // heads).to(gl.int64) * q_t + (m % heads) * q_h
    queries(at, mine, q_v, 0, V, V // 2, PLAIN, L)
    queries(at + V, mine, q_r, 0, R, R // 2, PLAIN, L)

    m = gl.program_id(0) * N + gl.arange(0, N, QUERY)
    limit = gl.minimum(length - tokens + m // heads + 1, end)
    most = gl.full([N], float("-inf"), gl.float32, QUERY)
    # By row of a tile: summed when all tiles have been.
    total = gl.full([BK, N], 0.0, gl.float32, M)
    zero = gl.full([BK, N], 0.0, gl.float32, M)
    acc = gl.full([V, N], 0.0, gl.float32, M)
    scale = scale * LOG2_E
    stage = 0
    for first in range(start, end, BK):
        k_v_here, k_r_here = k_v.index(stage), k_r.index(stage)
        async_copy.wait_group(STAGES - 1)
        fence_async_shared()
        barrier()
        s = warpgroup_mma(k_v_here, q_v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(k_r_here, q_r.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        row = first + gl.arange(0, BK, gl.SliceLayout(1, M))
        s = gl.where(row[:, None] < limit[None, :], s * scale, float("-inf"))
        new = gl.maximum(most, gl.max(s, 0))
        base = gl.where(new == float("-inf"), 0.0, new)
        keep = gl.exp2(most - base)[None, :]
        most = new
        weight = gl.exp2(s - base[None, :])
        total = total * keep + weight
        p.store(weight.to(T))
        acc = acc * keep
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(k_v_here.permute((1, 0)), p, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        _copy_tile(kv, kv_s, first + STAGES * BK, end, k_v_here, k_r_here, V, R, BK)
        stage = (stage + 1) % STAGES
    async_copy.wait_group(0)
    total = gl.sum(total, 0)
    found = total > 0
    total = gl.where(found, total, 1.0)
    place = ((b * tokens * heads + m) * splits + gl.program_id(1)).to(gl.int64)
    there = m < tokens * heads
    gl.store(part_lse + place, gl.where(found, most + log2(total), float("-inf")), mask=there)
    v = gl.arange(0, V, gl.SliceLayout(1, M))
    at = (part_out + place * V)[None, :] + v[:, None]
    gl.store(at, acc * (1.0 / total)[None, :], mask=there[None, :] & (v >= 0)[:, None])
