"""Gluon device code that the delta rule's kernels for Hopper share: TMA, and sums that stay where they are written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from megacpp_compile.lowerings.sparse_mla._gluon_rows import barrier

# By the names they have in Triton 3.9, and by those of 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


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
def product(a, b, N: gl.constexpr):
    """a [C, .] @ b [., N] of tiles in shared memory, under way."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    zero = gl.full([a.shape[0], N], 0.0, gl.float32, M)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


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
def column_sums(x):
    """Those of even and of odd columns, one after the other: warps exchange half as much at once."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    both = gl.join(gl.sum(even, 0), gl.sum(odd, 0))
    return gl.reshape(both, [x.shape[1]])
