"""Gluon device code that the delta rule's kernels for Hopper share: sums over rows, and rows that are divided by their
lengths."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from megacpp_compile.lowerings._kernels.gluon_tiles import barrier, multiplied, product


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
