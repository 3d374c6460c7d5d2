"""Gluon device code that the delta rule's kernels for Hopper share: TMA, and sums that stay where they are written."""

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

from megacpp_compile.lowerings.sparse_mla._gluon_rows import barrier

# By the names they have in Triton 3.9, and by those of 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """That many, of one arrival each, for all warps to wait at."""
    landed = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(COUNT):
        mbarrier.init(landed.index(which), count=1)
    fence_async_shared()
    barrier()
    return landed


@gluon.jit
def bring_tokens(rows, b, first, lane, landed, to):
    """A tile of `rows` [batch, tokens, lanes of all heads]; what lies beyond the last token is zero."""
    tma_load(rows, [b, first, lane], landed, to.reshape([1, to.shape[0], to.shape[1]]))


@gluon.jit
def bring_rows(flat, row, landed, to):
    """As many rows as `to` has, from number `row` on, and nothing else by that barrier."""
    mbarrier.expect(landed, 2 * to.shape[0] * to.shape[1])
    tma_load(flat, [row, 0], landed, to)


@gluon.jit
def put_tokens(rows, tile, out, b, first, lane):
    """`tile` to `out` [batch, tokens, lanes] by way of `rows`; what lies beyond the last token is cut."""
    barrier()
    rows.store(tile.to(rows.dtype))
    fence_async_shared()
    barrier()
    tma_store(out, [b, first, lane], rows.reshape([1, rows.shape[0], rows.shape[1]]))


@gluon.jit
def scaled(x, by):
    """x * by, here and now: moved behind GEMMs that are started and not done, the assembler would wait for these."""
    by = gl.convert_layout(gl.full(x.shape, 0.0, gl.float32, x.type.layout) + by, x.type.layout)
    return gl.inline_asm_elementwise("mul.f32 $0, $1, $2;", "=f,f,f", [x, by], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def added(to, x):
    """to + x, here and now: moved to where the sum is used, behind all waits, every x would be kept."""
    return gl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [to, x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def power(x):
    """2^x, here and now: made once for several places, it would be kept between them."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def product(a, b, N: gl.constexpr):
    """a [C, .] @ b [., N] of tiles in shared memory, under way; a warp group has all columns, or one of two half."""
    GROUPS: gl.constexpr = gl.num_warps() // 4
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, N // GROUPS, 16])
    zero = gl.full([a.shape[0], N], 0.0, gl.float32, M)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def multiplied(a, b, acc):
    """acc + a @ b, done."""
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(a, b, acc, is_async=True)])


@gluon.jit
def put_ones(to, KIND: gl.constexpr):
    """Into `to` [C, C] what sums rows of a tile. "behind": a row and all behind it. "middle": up to a row from the
    middle of the tile, less what lies between where it is before that. "halves": all of the row's half."""
    C: gl.constexpr = to.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i, j = gl.arange(0, C, gl.SliceLayout(1, L))[:, None], gl.arange(0, C, gl.SliceLayout(0, L))[None, :]
    if KIND == "behind":
        ones = gl.where(j >= i, 1.0, 0.0)
    elif KIND == "middle":
        ones = gl.where(j >= C // 2, 1.0, 0.0) - gl.where(j > i, 1.0, 0.0)
    else:
        ones = gl.where(j // (C // 2) == i // (C // 2), 1.0, 0.0)
    to.store(ones.to(to.dtype))


@gluon.jit
def summed(ones, x, part_s, rest_s):
    """ones @ x of float32, which is the sum of two parts of bfloat16 to 16 bits. `ones` is in shared memory: in
    registers, as a left operand, it came out wrong in some rows (ptxas 12.8)."""
    part = x.to(gl.bfloat16)
    part_s.store(part)
    rest_s.store((x - part.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    return multiplied(ones, rest_s, product(ones, part_s, x.shape[1]))


@gluon.jit
def unit_rows(rows, eps, L: gl.constexpr, NORM: gl.constexpr):
    """Rows of a tile in shared memory divided by their lengths, and what they were multiplied by."""
    row = rows.load(L).to(gl.float32)
    if NORM:
        norm = gl.rsqrt(gl.sum(row * row, 1) + eps)
        return row * norm[:, None], norm
    else:
        return row, gl.full([row.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, L))


@gluon.jit
def row_sum(x, rows):
    """Of x * rows, a tile in shared memory, by x's layout: [C]."""
    return gl.sum(x * rows.load(x.type.layout).to(gl.float32), 1)


@gluon.jit
def through_norm(grad, rows, norm, NORM: gl.constexpr):
    """The gradient of rows, a tile in shared memory, from that of rows * norm, norm = (|row|^2 + eps)^-1/2."""
    if NORM:
        unit = rows.load(grad.type.layout).to(gl.float32) * norm[:, None]
        return (grad - unit * gl.sum(unit * grad, 1)[:, None]) * norm[:, None]
    else:
        return grad


@gluon.jit
def value_grad(rows, errors, steps, dbeta, heads, length, BETA: gl.constexpr):
    """Multiplies `rows`, dR, by beta, and stores <dR, F>: few rows at once, as it all goes through registers."""
    C: gl.constexpr = rows.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    for part in gl.static_range(C // 16):
        at = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, L))
        here = rows.slice(part * 16, 16)
        d = here.load(L).to(gl.float32)
        if BETA:
            d_step = gl.sum(d * errors.slice(part * 16, 16).load(L).to(gl.float32), 1)
            gl.store(dbeta + at * heads, d_step.to(dbeta.dtype.element_ty), mask=at < length)
        here.store((d * gl.load(steps + at)[:, None]).to(rows.dtype))


@gluon.jit
def column_sums(x):
    """Those of even and of odd columns, one after the other: warps exchange half as much at once."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    both = gl.join(gl.sum(even, 0), gl.sum(odd, 0))
    return gl.reshape(both, [x.shape[1]])
