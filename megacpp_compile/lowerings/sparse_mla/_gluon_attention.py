"""The forward of `sparse_mla` for Hopper, in Gluon: a program has 64 heads of one query, and its warps have roles.

Four warps score a tile of 64 rows and take its softmax; eight have the sums, 64 heads by all value channels, and
multiply probabilities and values of the tile before; four more copy rows. Between them are barriers in shared memory:
no warp waits for another's work but for the tile it needs.

MODE is WIDE (rows of the queries' dtype), WIDENED (rows in fp8, which those who copy turn into that) or FP8 (GEMMs
of fp8: queries and probabilities are rounded to e4m3 as well, and the warps of the sums copy rows, too: as operands of
theirs come from registers, there may be no more than twelve warps).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megacpp_compile.lowerings._kernels.gluon_tiles import barrier, load_async, ring, seen_as, shared_tile, shared_tiles
from megacpp_compile.lowerings._kernels.triton_math import LN_2, LOG2_E
from megacpp_compile.lowerings.sparse_mla._gluon_rows import bring, copy, kept, named, tiles_of

WIDE, WIDENED, FP8 = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# Bytes of two 16-bit channels of two rows each become four rows of the even channel, and of the odd one.
_APART = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _scores(q_v, q_r, k_v, k_r, slot, zero):
    """Starts the GEMMs of all queries and a tile's rows; does not wait for them."""
    s = warpgroup_mma(q_v, k_v.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_r, k_r.index(slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def _softmax(q_v, q_r, q_scale, k_v, k_r, numbers, scales, factors, logs, inverses, p, keep, full, p_full, p_empty, lse,
             heads, tiles, scale,
             BH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
             FP8_PRODUCTS: gl.constexpr):  # fmt: skip
    """Scores and softmax of all tiles, by one warp group: p [BH, BK], what the sums before are to be multiplied by, and
    in the end by what they are to be divided.

    Under FP8_PRODUCTS p are weights of payloads, probabilities times the rows' scales: the largest one so far is 256.
    """
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 32 if FP8_PRODUCTS else 16])
    HEAD: gl.constexpr = gl.SliceLayout(1, M)
    ROW: gl.constexpr = gl.SliceLayout(0, M)
    C: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.full([BH, BK], 0.0, gl.float32, M)
    most = gl.full([BH], float("-inf"), gl.float32, HEAD)
    total = gl.full([BH], 0.0, gl.float32, HEAD)
    if FP8_PRODUCTS:
        scale = q_scale.load(HEAD) * scale
    for i in range(tiles):
        slot = i % STAGES
        turn = i % TURNS
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        fence_async_shared()
        s = _scores(q_v, q_r, k_v, k_r, slot, zero)
        if FP8_PRODUCTS:
            factor = scales.index(slot).load(C)
            size = gl.maximum(gl.abs(factor), 1e-30)
            factors.store(factor)
            logs.store(gl.where(numbers.index(slot).load(C) >= 0, _log2(size), float("-inf")))
            inverses.store((1.0 / 256.0) / size)
        s = warpgroup_mma_wait(0, deps=[s])
        if FP8_PRODUCTS:
            factor = factors.load(ROW)
            s = s * scale[:, None] * factor[None, :] + logs.load(ROW)[None, :]
        else:
            s = gl.where((numbers.index(slot).load(ROW) >= 0)[None, :], s * scale, float("-inf"))
        new = gl.maximum(most, gl.max(s, 1))
        base = gl.where(new == float("-inf"), 0.0, new)
        kept_share = gl.exp2(most - base)
        most = new
        if FP8_PRODUCTS:
            weight = gl.exp2(s - (base - 8.0)[:, None])
            total = total * kept_share + gl.sum(weight * inverses.load(ROW)[None, :], 1)
            weight = weight * gl.where(factor < 0, -1.0, 1.0)[None, :]
            # In the order in which values lie in registers (`_transposed`).
            weight = gl.permute(gl.reshape(weight, [BH, BK // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
            weight = gl.reshape(weight, [BH, BK])
        else:
            weight = gl.exp2(s - base[:, None])
            total = total * kept_share + gl.sum(weight, 1)
        mbarrier.wait(p_empty.index(turn), (i // TURNS + 1) & 1)
        p.index(turn).store(weight.to(p.dtype))
        keep.index(turn).store(kept_share)
        fence_async_shared()
        barrier()
        mbarrier.arrive(p_full.index(turn), count=1)
    found = total > 0
    turn = tiles % TURNS
    mbarrier.wait(p_empty.index(turn), (tiles // TURNS + 1) & 1)
    keep.index(turn).store(gl.where(found, 1.0 / gl.where(found, total, 1.0), 0.0))
    barrier()
    mbarrier.arrive(p_full.index(turn), count=1)
    h = gl.arange(0, BH, HEAD)
    gl.store(lse + h, gl.where(found, (most + _log2(total)) * LN_2, float("-inf")), mask=h < heads)


@gluon.jit
def _sums(k_v, p, keep, full, empty, p_full, p_empty, out, heads, tiles,
          V: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):  # fmt: skip
    """out [BH, V], by two warp groups, each with half of the channels."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, min(128, V // 2), 16])
    HEAD: gl.constexpr = gl.SliceLayout(1, M)
    acc = gl.full([BH, V], 0.0, gl.float32, M)
    for i in range(tiles):
        slot = i % STAGES
        turn = i % TURNS
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        mbarrier.wait(p_full.index(turn), (i // TURNS) & 1)
        acc = acc * keep.index(turn).load(HEAD)[:, None]
        fence_async_shared()
        acc = warpgroup_mma(p.index(turn), k_v.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(p_empty.index(turn), count=1)
        mbarrier.arrive(empty.index(slot), count=1)
    turn = tiles % TURNS
    mbarrier.wait(p_full.index(turn), (tiles // TURNS) & 1)
    acc = acc * keep.index(turn).load(HEAD)[:, None]
    h, lane = gl.arange(0, BH, HEAD), gl.arange(0, V, gl.SliceLayout(0, M))
    there = (h < heads)[:, None] & (lane >= 0)[None, :]
    gl.store(out + h[:, None] * V + lane[None, :], acc.to(out.dtype.element_ty), mask=there)


@gluon.jit
def _transposed(values, first: gl.constexpr, V: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr):
    """Values of 32 rows, channels by rows, as the left operand of a GEMM: those of even channels, and of odd ones.

    wgmma wants the rows of a channel side by side, four to a register. `ldmatrix` turns 16 bits at once: registers that
    hold two channels of rows 2t and 2t + 1 of 16, and of 2t + 8 and 2t + 9. Their bytes, put apart by channel, are such
    a register, of which rows are in another order; so are the probabilities.
    """
    M_8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BH, 32])
    M_16: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BH, 16])
    pairs = seen_as(values, gl.int16, BK, V // 2, gl.NVMMASharedLayout(128, 16))
    pairs = pairs.slice(first, 32, 0).permute((1, 0)).load(gl.DotOperandLayout(0, M_16, 2))
    pairs = gl.reshape(gl.permute(gl.reshape(pairs, [V // 2, 2, 2, 4, 2]), (0, 1, 3, 2, 4)), [V // 2, 32])
    pairs = gl.convert_layout(pairs, gl.DotOperandLayout(0, M_8, 4), assert_trivial=True)
    even, odd = gl.inline_asm_elementwise(_APART, "=r,=r,r,r", [pairs], (gl.int8, gl.int8), True, 4)
    return even.to(gl.float8e4nv, bitcast=True), odd.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _sums_fp8(k_v, k_r, p, keep, numbers, scales, full, p_full, p_empty, out, heads, tiles,
              kv, kv_scale, indices, rows, last, topk, kv_s, i_k, s_s,
              V: gl.constexpr, R: gl.constexpr, CAUSAL: gl.constexpr, BH: gl.constexpr, BK: gl.constexpr,
              STAGES: gl.constexpr, TURNS: gl.constexpr):  # fmt: skip
    """out as channels by heads, so that values are the operand that comes from registers, where they are turned.

    These warps copy rows two tiles ahead: into the place of a tile that has been scored and that they have multiplied.
    """
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BH, 32])
    HEAD: gl.constexpr = gl.SliceLayout(0, M)
    even_sums = gl.full([V // 2, BH], 0.0, gl.float32, M)
    odd_sums = gl.full([V // 2, BH], 0.0, gl.float32, M)
    index = named(indices, 0, topk, i_k, BK)
    for tile in gl.static_range(STAGES - 1):
        numbers.index(tile).store(kept(index, tile, rows, last, topk, CAUSAL, BK))
        index = named(indices, tile + 1, topk, i_k, BK)
    barrier()
    for tile in gl.static_range(STAGES - 2):
        copy(kv, kv_scale, numbers.index(tile), scales.index(tile), k_v.index(tile), k_r.index(tile), full.index(tile),
             kv_s, s_s, V, R, BK, 16, True)  # fmt: skip
    for i in range(tiles):
        slot = i % STAGES
        turn = i % TURNS
        ahead = i + STAGES - 2
        to = ahead % STAGES
        copy(kv, kv_scale, numbers.index(to), scales.index(to), k_v.index(to), k_r.index(to), full.index(to),
             kv_s, s_s, V, R, BK, 16, True)  # fmt: skip
        numbers.index((ahead + 1) % STAGES).store(kept(index, ahead + 1, rows, last, topk, CAUSAL, BK))
        index = named(indices, ahead + 2, topk, i_k, BK)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        mbarrier.wait(p_full.index(turn), (i // TURNS) & 1)
        kept_share = keep.index(turn).load(HEAD)[None, :]
        even_sums = even_sums * kept_share
        odd_sums = odd_sums * kept_share
        for first in gl.static_range(0, BK, 32):
            even, odd = _transposed(k_v.index(slot), first, V, BH, BK)
            weights = p.index(turn).slice(first, 32, 1).permute((1, 0))
            even_sums = warpgroup_mma(even, weights, even_sums, is_async=True)
            odd_sums = warpgroup_mma(odd, weights, odd_sums, is_async=True)
        even_sums, odd_sums = warpgroup_mma_wait(0, deps=[even_sums, odd_sums])
        barrier()
        mbarrier.arrive(p_empty.index(turn), count=1)
    async_copy.commit_group()  # of tiles behind the last: zeros, but in the memory that is used next
    async_copy.wait_group(0)
    turn = tiles % TURNS
    mbarrier.wait(p_full.index(turn), (tiles // TURNS) & 1)
    share = keep.index(turn).load(HEAD)[None, :] * (1.0 / 256.0)
    barrier()
    T: gl.constexpr = out.dtype.element_ty
    both = gl.join((even_sums * share).to(T), (odd_sums * share).to(T))
    # All of it, as Triton 3.8 sees memory as something else of the same size only.
    ALL: gl.constexpr = STAGES * BK * k_v.dtype.primitive_bitwidth // T.primitive_bitwidth
    rows_of_lanes = seen_as(k_v, T, ALL, V, gl.SwizzledSharedLayout(8, 1, 8, [1, 0])).slice(0, BH, 0)
    rows_of_lanes.store(gl.reshape(gl.permute(both, (1, 0, 2)), [BH, V]))
    barrier()
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    h, lane = gl.arange(0, BH, gl.SliceLayout(1, L)), gl.arange(0, V, gl.SliceLayout(0, L))
    there = (h < heads)[:, None] & (lane >= 0)[None, :]
    gl.store(out + h[:, None] * V + lane[None, :], rows_of_lanes.load(L), mask=there)


@gluon.jit
def sparse_mla_forward(q, kv, indices, kv_scale, out, lse, tokens, rows, heads, topk, offset, scale,
                       q_b, q_t, q_h, kv_b, kv_s, i_b, i_t, i_k, s_b, s_s,
                       V: gl.constexpr, R: gl.constexpr, CAUSAL: gl.constexpr, MODE: gl.constexpr, BH: gl.constexpr,
                       BK: gl.constexpr, STAGES: gl.constexpr, SOFTMAX_REGISTERS: gl.constexpr,
                       COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """One query and BH of its heads. Launched with eight warps, which become those of the sums."""
    T: gl.constexpr = kv.dtype.element_ty if MODE == FP8 else q.dtype.element_ty
    TURNS: gl.constexpr = 4 if MODE == FP8 else 2
    across = (heads + BH - 1) // BH
    t, b = (gl.program_id(0) // across).to(gl.int64), gl.program_id(1).to(gl.int64)
    start = (gl.program_id(0) % across) * BH
    heads_here = heads - start
    indices += b * i_b + t * i_t
    kv += b * kv_b
    kv_scale += b * s_b
    q += b * q_b + t * q_t + start.to(gl.int64) * q_h
    out += ((b * tokens + t) * heads + start) * V
    lse += (b * tokens + t) * heads + start
    last = (t + offset).to(gl.int32)

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_v = shared_tiles(T, STAGES, BK, V)
    k_r = shared_tiles(T, STAGES, BK, R)
    q_v = shared_tile(T, BH, V)
    q_r = shared_tile(T, BH, R)
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES, BK], FLAT)
    keep = gl.allocate_shared_memory(gl.float32, [TURNS, BH], FLAT)
    if MODE == FP8:
        p = shared_tiles(T, TURNS, BH, BK)
        q_scale = gl.allocate_shared_memory(gl.float32, [BH], FLAT)
        factors = gl.allocate_shared_memory(gl.float32, [BK], FLAT)
        logs = gl.allocate_shared_memory(gl.float32, [BK], FLAT)
        inverses = gl.allocate_shared_memory(gl.float32, [BK], FLAT)
    else:
        # The rest of a tile's rows is read no more when its probabilities are written.
        gl.static_assert(R == BK and BH == BK and STAGES == TURNS)
        p = k_r
        q_scale = keep
        factors, logs, inverses = keep, keep, keep
    if MODE == WIDE:
        scales = keep
    else:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, BK], FLAT)
    full, empty = ring(STAGES, 257 if MODE == FP8 else (129 if MODE == WIDE else 1))
    p_full, p_empty = ring(TURNS)

    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    h = gl.arange(0, BH, gl.SliceLayout(1, L))
    lane, rest = gl.arange(0, V, gl.SliceLayout(0, L)), gl.arange(0, R, gl.SliceLayout(0, L))
    at = (q + h.to(gl.int64) * q_h)[:, None]
    at_v = gl.max_contiguous(gl.multiple_of(at + lane[None, :], [1, 16]), [1, 8])
    at_r = gl.max_contiguous(gl.multiple_of(at + V + rest[None, :], [1, 16]), [1, 8])
    there_v = (h < heads_here)[:, None] & (lane >= 0)[None, :]
    there_r = (h < heads_here)[:, None] & (rest >= 0)[None, :]
    if MODE == FP8:
        x_v, x_r = gl.load(at_v, mask=there_v, other=0.0), gl.load(at_r, mask=there_r, other=0.0)
        tiles = tiles_of(indices, rows, last, topk, i_k, CAUSAL, BK)
        largest = gl.maximum(gl.max(gl.abs(x_v), 1), gl.max(gl.abs(x_r), 1)).to(gl.float32)
        # At least what float32 has the inverse of.
        own = gl.where(largest > 0, gl.maximum(largest * (1.0 / 448.0), 1e-37), 1.0)
        q_scale.store(own)
        q_v.store((x_v.to(gl.float32) / own[:, None]).to(T))
        q_r.store((x_r.to(gl.float32) / own[:, None]).to(T))
    else:
        load_async(q_v, at_v, mask=there_v)
        load_async(q_r, at_r, mask=there_r)
        async_copy.commit_group()
        tiles = tiles_of(indices, rows, last, topk, i_k, CAUSAL, BK)
        async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    scale = scale * LOG2_E
    if MODE == FP8:
        gl.warp_specialize([
            (_sums_fp8, (k_v, k_r, p, keep, numbers, scales, full, p_full, p_empty, out, heads_here, tiles,
                         kv, kv_scale, indices, rows, last, topk, kv_s, i_k, s_s, V, R, CAUSAL, BH, BK, STAGES, TURNS)),
            (_softmax, (q_v, q_r, q_scale, k_v, k_r, numbers, scales, factors, logs, inverses, p, keep, full, p_full,
                        p_empty, lse, heads_here, tiles, scale, BH, BK, STAGES, TURNS, True)),
        ], [4], [SOFTMAX_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_sums, (k_v, p, keep, full, empty, p_full, p_empty, out, heads_here, tiles, V, BH, BK, STAGES, TURNS)),
            (_softmax, (q_v, q_r, q_scale, k_v, k_r, numbers, scales, factors, logs, inverses, p, keep, full, p_full,
                        p_empty, lse, heads_here, tiles, scale, BH, BK, STAGES, TURNS, False)),
            (bring, (kv, kv_scale, indices, numbers, scales, k_v, k_r, full, empty, tiles, rows, last, topk, kv_s, i_k,
                     s_s, V, R, BK, CAUSAL, STAGES, MODE == WIDENED)),
        ], [4, 4], [SOFTMAX_REGISTERS, COPY_REGISTERS])  # fmt: skip
