"""The gradient of the scores on Hopper, in Gluon, chunks side by side: as `_triton_gradients.ssd_scores_grad`.

Of a chunk's pairs of tokens only those are computed in which the reader is not before the writer: three blocks of 64 by
64, two on the diagonal, each a program's. So few registers do for one that three of a multiprocessor take turns; with
all three blocks in a program it takes 1.6 times as long, as nothing runs while its warps exchange sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from megacpp_compile.lowerings._kernels.gluon_tiles import (
    added,
    barrier,
    barriers,
    bring_tokens,
    column_sums,
    in_parts,
    power,
    product,
    shared_tile,
)


@gluon.jit
def _bring(dy, x, b, reader, writer, lane, landed, grad_s, x_s):
    ROW: gl.constexpr = grad_s.dtype.primitive_bitwidth // 8 + 2
    mbarrier.expect(landed, x_s.shape[0] * x_s.shape[1] * ROW)
    bring_tokens(dy, b, reader, lane, landed, grad_s)
    bring_tokens(x, b, writer, lane, landed, x_s)


@gluon.jit
def _vectors(decay, steps, row, late, early, there, H: gl.constexpr):
    """Of a head's chunk, number `row`, the decay's logarithms of readers and of writers, and the writers' steps [4 H];
    what follows is not read."""
    place = gl.arange(0, 4 * H, gl.BlockedLayout([2], [32], [4], [0]))
    kind, there = place // H, (place >= 0) & there
    token = row * 2 * H + gl.where(kind == 0, late, early) * H + place % H
    a = gl.load(decay + token, mask=there & (kind < 2), other=0.0)
    return a + gl.load(steps + token, mask=there & (kind == 2), other=0.0)


@gluon.jit
def _by_rows(a_s, b_s, OF_A: gl.constexpr, OF: gl.constexpr):
    """a @ b^T under way, of tiles in shared memory: a is bfloat16, or float32, then in two parts, in registers."""
    if a_s.dtype == gl.bfloat16:
        return product(a_s, b_s.permute((1, 0)), b_s.shape[0])
    else:
        LEFT: gl.constexpr = gl.DotOperandLayout(0, OF_A, 2)
        zero = gl.full([a_s.shape[0], b_s.shape[0]], 0.0, gl.float32, OF)
        high, low = in_parts(a_s.load(OF_A))
        out = warpgroup_mma(gl.convert_layout(low, LEFT), b_s.permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(gl.convert_layout(high, LEFT), b_s.permute((1, 0)), out, is_async=True)


@gluon.jit
def ssd_scores_grad_hopper(dy, x, B, C, decay, steps, cuts, d_scores, row_sums, column_sums, across, diagonal, d_skip,
                           heads, chunks, per_group, parts, L: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
                           HB: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """dy and x are descriptors of [b, tokens, channels of all heads] by tiles [1, 64, P], B and C of all groups by
    [1, 64, N].

    row_sums, column_sums, diagonal [b, c, h, L] and d_skip [b, c, h, 2] are as Triton's kernel has them, of a half of
    the chunk by itself; across [b, c, h, L]: what the second half's rows have besides, then the first's columns."""
    if gl.program_id(0) % 3 == 1:
        _heads(dy, x, B, C, decay, steps, cuts, d_scores, across, across, across, across, heads, chunks, per_group,
               parts, 1, 0, False, L, P, N, HB, PACKED)  # fmt: skip
    else:
        half = gl.program_id(0) % 3 // 2
        _heads(dy, x, B, C, decay, steps, cuts, d_scores, row_sums, column_sums, diagonal, d_skip, heads, chunks,
               per_group, parts, half, half, True, L, P, N, HB, PACKED)  # fmt: skip


@gluon.jit
def _heads(dy, x, B, C, decay, steps, cuts, d_scores, row_sums, column_totals, diagonal, d_skip, heads, chunks,
           per_group, parts, late, early, DIAGONAL: gl.constexpr, L: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
           HB: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """The block of readers in half `late` of a chunk and writers in half `early`."""
    gl.static_assert(gl.num_warps() == 4 and L == 128)
    T: gl.constexpr = gl.bfloat16
    H: gl.constexpr = L // 2
    OF_H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    OF_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OF_H)
    COLUMN: gl.constexpr = gl.SliceLayout(0, OF_H)
    c, part, b = gl.program_id(0) // 3, gl.program_id(1), gl.program_id(2)
    q_s = shared_tile(T, H, N)
    k_s = shared_tile(T, H, N)
    x_s = shared_tile(T, H, P)
    grad_s = shared_tile(dy.dtype, H, P)
    rows = gl.allocate_shared_memory(gl.float32, [2, 4 * H], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    landed = barriers(2)
    lane, h = part * HB // per_group * N, part * HB
    reader, writer = c * L + late * H, c * L + early * H
    row = (b * chunks + c) * heads + h
    mbarrier.expect(landed.index(0), 4 * H * N)
    bring_tokens(C, b, reader, lane, landed.index(0), q_s)
    bring_tokens(B, b, writer, lane, landed.index(0), k_s)
    _bring(dy, x, b, reader, writer, h * P, landed.index(1), grad_s, x_s)
    rows.index(0).store(_vectors(decay, steps, row, late, early, True, H))
    r, s = gl.arange(0, H, ROW), gl.arange(0, H, COLUMN)
    total = gl.full([H, H], 0.0, gl.float32, OF_H)
    barrier()
    mbarrier.wait(landed.index(0), 0)
    for i in range(HB):
        mine, more = rows.index(i & 1), i + 1 < HB
        coming = _vectors(decay, steps, row + 1, late, early, more, H)
        scores = product(q_s, k_s.permute((1, 0)), H)
        mbarrier.wait(landed.index(1), i & 1)
        d = _by_rows(grad_s, x_s, OF_P, OF_H)
        rows.index(1 - (i & 1)).store(coming)
        scores = warpgroup_mma_wait(1, deps=[scores])
        d = warpgroup_mma_wait(0, deps=[d])
        barrier()
        if more:
            _bring(dy, x, b, reader, writer, (h + 1) * P, landed.index(1), grad_s, x_s)
        if DIAGONAL:
            same = r[:, None] == s[None, :]
            straight = gl.sum(gl.where(same, d, 0.0), 1)
            gl.store(diagonal + row * L + late * H + r, gl.sum(gl.where(same, d * scores, 0.0), 1))
            gl.store(d_skip + row * 2 + late, gl.sum(straight, 0))
            scores = gl.where(same, 0.0, scores)
        apart = mine.slice(0, H).load(ROW)[:, None] - mine.slice(H, H).load(COLUMN)[None, :]
        if DIAGONAL:
            apart = gl.where(r[:, None] >= s[None, :], apart, float("-inf"))
        if PACKED:
            of_chunk = cuts + (b * chunks + c) * L
            of_r, of_s = gl.load(of_chunk + late * H + r), gl.load(of_chunk + early * H + s)
            apart = gl.where(of_r[:, None] == of_s[None, :], apart, float("-inf"))
        d = d * power(apart)
        gl.store(column_totals + row * L + early * H + (0 if DIAGONAL else H) + s,
                 gl.convert_layout(column_sums(scores * d), COLUMN))  # fmt: skip
        d = d * mine.slice(2 * H, H).load(COLUMN)[None, :]
        gl.store(row_sums + row * L + (late * H if DIAGONAL else 0) + r, gl.sum(scores * d, 1))
        total = added(total, d)
        row += 1
        h += 1
    at = ((b * chunks + c) * parts + part).to(gl.int64) * L * L + r[:, None] * L + s[None, :]
    gl.store(d_scores + at + (late * L + early) * H, total)
    if not DIAGONAL:
        gl.store(d_scores + at + H, gl.full([H, H], 0.0, gl.float32, OF_H))
