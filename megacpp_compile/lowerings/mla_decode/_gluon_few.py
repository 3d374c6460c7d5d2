"""`mla_decode` on Hopper in Gluon for few queries, up to N, 16 or 32: rows are what GEMMs have 64 of.

Scores are rows by queries and sums channels by queries, so that wgmma's 64 are rows and channels, and queries its short
side: nothing is padded, and a tile that has been brought is read from shared memory once for each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from megacpp_compile.lowerings.mla_decode._gluon_rows import CODES, PLAIN, channel, decoded, log2, part, planes, words
from megacpp_compile.lowerings.mla_decode._triton_kernels import LOG2_E
from megacpp_compile.lowerings.sparse_mla._gluon_rows import barrier, load_async, seen_as


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
def _read_tile(kv, kv_s, row_scale, s_s, s_d, first, end, M: gl.constexpr,
               V: gl.constexpr, R: gl.constexpr, BK: gl.constexpr, KIND: gl.constexpr):  # fmt: skip
    """A tile's words, and the scales of its rows' two parts. A vector of words becomes 16 bytes of shared memory."""
    W: gl.constexpr = gl.num_warps()
    VEC: gl.constexpr = 1 if KIND == CODES else 2
    PER: gl.constexpr = 8 if KIND == CODES else 4
    L_V: gl.constexpr = gl.BlockedLayout([1, VEC], [1, 32], [W, 1], [1, 0])
    L_R: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [W, 1], [1, 0])
    row = first + gl.arange(0, BK, gl.SliceLayout(1, L_V))
    x_v = words(kv, kv_s, row, row < end, 0, V // PER, L_V)
    row = first + gl.arange(0, BK, gl.SliceLayout(1, L_R))
    x_r = words(kv, kv_s, row, row < end, V // PER, R // PER, L_R)
    row = first + gl.arange(0, BK, gl.SliceLayout(1, M))
    at = row_scale + row.to(gl.int64) * s_s
    its_v = gl.load(at, mask=row < end, other=0.0)
    its_r = its_v
    if KIND == CODES:
        its_r = gl.load(at + s_d, mask=row < end, other=0.0)
    return x_v, x_r, its_v, its_r


@gluon.jit
def mla_decode_few(q, kv, row_scale, codebook, lengths, part_out, part_lse, tokens, rows, heads, splits, scale,
                   q_b, q_t, q_h, kv_b, kv_s, s_b, s_s, s_d, l_b,
                   V: gl.constexpr, R: gl.constexpr, KIND: gl.constexpr, N: gl.constexpr, BK: gl.constexpr,
                   STAGES: gl.constexpr):  # fmt: skip
    """One warp group: a part of a sequence's rows, and N of its queries. Several programs share an SM, so that while one
    waits for rows or turns them into bfloat16 another multiplies."""
    gl.static_assert(gl.num_warps() == 4 and BK == 64)
    T: gl.constexpr = q.dtype.element_ty
    b = gl.program_id(2).to(gl.int64)
    length, start, end = part(lengths, b, rows, splits, l_b, BK)
    kv += b * kv_b
    row_scale += b * s_b
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    QUERY: gl.constexpr = gl.SliceLayout(0, M)
    OF_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, V], T)
    OF_R: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, R], T)
    k_v = gl.allocate_shared_memory(T, [STAGES, BK, V], OF_V)
    k_r = gl.allocate_shared_memory(T, [STAGES, BK, R], OF_R)
    q_v = gl.allocate_shared_memory(T, [N, V], OF_V)
    q_r = gl.allocate_shared_memory(T, [N, R], OF_R)
    p = gl.allocate_shared_memory(T, [BK, N], gl.NVMMASharedLayout.get_default_for([BK, N], T))

    if KIND == PLAIN:
        for stage in gl.static_range(STAGES):
            _copy_tile(kv, kv_s, start + stage * BK, end, k_v.index(stage), k_r.index(stage), V, R, BK)
        row = gl.arange(0, BK, gl.SliceLayout(1, M))
        x_v, x_r, its_v, its_r = row, row, row, row  # there are none
    else:
        x_v, x_r, its_v, its_r = _read_tile(kv, kv_s, row_scale, s_s, s_d, start, end, M, V, R, BK, KIND)
    book = planes(codebook, KIND)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    m = gl.program_id(0) * N + gl.arange(0, N, gl.SliceLayout(1, L))
    mine = (m < tokens * heads)[:, None]
    at = (q + b * q_b + (m // heads).to(gl.int64) * q_t + (m % heads) * q_h)[:, None]
    v, r = gl.arange(0, V, gl.SliceLayout(0, L)), gl.arange(0, R, gl.SliceLayout(0, L))
    q_v.store(gl.load(at + channel(v, V // 2, KIND)[None, :], mask=mine & (v >= 0)[None, :], other=0.0))
    q_r.store(gl.load(at + V + channel(r, R // 2, KIND)[None, :], mask=mine & (r >= 0)[None, :], other=0.0))

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
        if KIND == PLAIN:
            async_copy.wait_group(STAGES - 1)
        else:
            PER: gl.constexpr = 8 if KIND == CODES else 4
            WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
            seen_as(k_v_here, gl.int32, BK, V // 2, WORDS).store(decoded(x_v, book, BK, V // PER, KIND))
            seen_as(k_r_here, gl.int32, BK, R // 2, WORDS).store(decoded(x_r, book, BK, R // PER, KIND))
            of_v, of_r = its_v[:, None], its_r[:, None]
            x_v, x_r, its_v, its_r = _read_tile(kv, kv_s, row_scale, s_s, s_d, first + BK, end, M, V, R, BK, KIND)
        fence_async_shared()
        barrier()
        s = warpgroup_mma(k_v_here, q_v.permute((1, 0)), zero, use_acc=False, is_async=True)
        if KIND == CODES:
            s_rest = warpgroup_mma(k_r_here, q_r.permute((1, 0)), zero, use_acc=False, is_async=True)
            s, s_rest = warpgroup_mma_wait(0, deps=[s, s_rest])
            s = s * of_v + s_rest * of_r
        else:
            s = warpgroup_mma(k_r_here, q_r.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            if KIND != PLAIN:
                s = s * of_v
        row = first + gl.arange(0, BK, gl.SliceLayout(1, M))
        s = gl.where(row[:, None] < limit[None, :], s * scale, float("-inf"))
        new = gl.maximum(most, gl.max(s, 0))
        base = gl.where(new == float("-inf"), 0.0, new)
        keep = gl.exp2(most - base)[None, :]
        most = new
        weight = gl.exp2(s - base[None, :])
        total = total * keep + weight
        if KIND != PLAIN:
            weight = weight * of_v
        p.store(weight.to(T))
        acc = acc * keep
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(k_v_here.permute((1, 0)), p, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        if KIND == PLAIN:
            _copy_tile(kv, kv_s, first + STAGES * BK, end, k_v_here, k_r_here, V, R, BK)
            if STAGES > 1:
                stage = (stage + 1) % STAGES
    if KIND == PLAIN:
        async_copy.wait_group(0)
    total = gl.sum(total, 0)
    found = total > 0
    total = gl.where(found, total, 1.0)
    place = ((b * tokens * heads + m) * splits + gl.program_id(1)).to(gl.int64)
    there = m < tokens * heads
    gl.store(part_lse + place, gl.where(found, most + log2(total), float("-inf")), mask=there)
    v = channel(gl.arange(0, V, gl.SliceLayout(1, M)), V // 2, KIND)
    at = (part_out + place * V)[None, :] + v[:, None]
    gl.store(at, acc * (1.0 / total)[None, :], mask=there[None, :] & (v >= 0)[:, None])
