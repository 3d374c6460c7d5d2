"""How warps that multiply take a result of theirs apart, and bring it to memory, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megacpp_compile.lowerings._kernels.gluon_tiles import barrier


@gluon.jit
def halves(x):
    """The first half of the columns, and the last."""
    x = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return gl.split(gl.permute(x, (0, 2, 1)))


@gluon.jit
def upper_and_lower(x):
    """The first half of the rows, and the last."""
    x = gl.reshape(x, [2, x.shape[0] // 2, x.shape[1]])
    return gl.split(gl.permute(x, (1, 2, 0)))


@gluon.jit
def put(x, staged, to, first, stop, n, width, stride):
    """Rows before `stop` of a result, whose rows lie at `to`, by way of `staged`."""
    OF_ROW: gl.constexpr = min(32, staged.shape[1] // 8)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // OF_ROW, OF_ROW], [gl.num_warps(), 1], [1, 0])
    barrier()
    staged.store(x.to(staged.dtype))
    barrier()
    give(staged.load(L), to, first, stop, n, width, stride)


@gluon.jit
def give(x, to, first, stop, n, width, stride):
    """Rows before `stop` of a result, to memory; x: by 16 bytes a thread."""
    L: gl.constexpr = x.type.layout
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    lane = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    at = to + first.to(gl.int64) * stride + n + (row[:, None] * stride + lane[None, :])
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
    gl.store(at, x, mask=(row < stop - first)[:, None] & (lane // 8 < (width - n) // 8)[None, :])
