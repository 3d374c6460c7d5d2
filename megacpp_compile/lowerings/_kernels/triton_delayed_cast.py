"""A tensor as an e4m3 payload by the scale that its past gives, on CUDA: in one pass over memory, which finds its
largest magnitude on the way and, where that is asked for, writes the payload transposed as well.

The scale and the payload are those of `fp8.delayed_scale` and `fp8.rounded_by_past`, but that a number is multiplied by
the inverse of the scale. Source of the idea: Transformer Engine's cast-transpose kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import MARGIN, ROOM, SAMPLE
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, interpreted, last_dim_contiguous
from megacpp_compile.lowerings._kernels.triton_quantise import FLOAT8, scale_from, word_of

# Rows and channels of a tile.
TILE = {"RB": 64, "CB": 128, "num_warps": 4}


@triton.jit
def _scale_of_past(x, largest, rows, channels, stride, MARGIN: tl.constexpr, SAMPLE: tl.constexpr,
                   ROOM: tl.constexpr):  # fmt: skip
    """The scale that `largest[0]` gives, or where it is 0 a sample of x."""
    known = tl.load(largest) * ROOM
    if known == 0:
        r = tl.arange(0, SAMPLE)[:, None] * tl.maximum(rows // SAMPLE, 1)
        c = tl.arange(0, SAMPLE)[None, :] * tl.maximum(channels // SAMPLE, 1)
        inside = (r < rows) & (c < channels)
        sample = tl.load(x + r.to(tl.int64) * stride + c, mask=inside, other=0).to(tl.float32)
        size = tl.abs(sample)
        known = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0) * MARGIN
    return scale_from(known)


@triton.jit
def _row_of_four(x, out, i: tl.constexpr, four, c, rows, channels, stride, inverse, ROWS: tl.constexpr):
    """Rows i of every four: rounded into `out`, with ROWS; as numbers that fit; and how large any is."""
    r = 4 * four + i
    inside = (r < rows)[:, None] & (c < channels)[None, :]
    v = tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0).to(tl.float32)
    size = tl.abs(v)
    # An infinite number is no large one: what it ran over from shall be seen.
    v = tl.where(size < float("inf"), tl.minimum(tl.maximum(v * inverse, -448.0), 448.0), float("nan"))
    if ROWS:
        tl.store(out + r.to(tl.int64)[:, None] * channels + c[None, :], v.to(tl.float8e4nv), mask=inside)
    return v, size


@triton.jit
def fp8_delayed_cast(x, largest, out, transposed, scale, seen, rows, channels, stride, across,
                     MARGIN: tl.constexpr, SAMPLE: tl.constexpr, ROOM: tl.constexpr, ROWS: tl.constexpr,
                     TRANSPOSED: tl.constexpr, INTERPRETED: tl.constexpr, RB: tl.constexpr,
                     CB: tl.constexpr):  # fmt: skip
    """A tile of out [rows, channels], with ROWS, and of transposed [channels, rows], with TRANSPOSED, and seen [tiles],
    the largest magnitude in it. It is words of four rows that are transposed, not bytes, as in
    `quantise_transposed`."""
    tile = tl.program_id(0)
    four = (tile // across) * (RB // 4) + tl.arange(0, RB // 4)
    c = (tile % across) * CB + tl.arange(0, CB)
    of = _scale_of_past(x, largest, rows, channels, stride, MARGIN, SAMPLE, ROOM)
    v0, s0 = _row_of_four(x, out, 0, four, c, rows, channels, stride, 1 / of, ROWS)
    v1, s1 = _row_of_four(x, out, 1, four, c, rows, channels, stride, 1 / of, ROWS)
    v2, s2 = _row_of_four(x, out, 2, four, c, rows, channels, stride, 1 / of, ROWS)
    v3, s3 = _row_of_four(x, out, 3, four, c, rows, channels, stride, 1 / of, ROWS)
    if TRANSPOSED:
        word = word_of(v0, v1, v2, v3, INTERPRETED)
        words = rows // 4
        place = c.to(tl.int64)[:, None] * words + four[None, :]
        of_words = transposed.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(of_words + place, tl.trans(word), mask=(c < channels)[:, None] & (four < words)[None, :])
    most = tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3))
    tl.store(seen + tile, tl.max(tl.max(most, 1), 0))
    if tile == 0:
        tl.store(scale, of)


_cast = Kernel(fp8_delayed_cast, [TILE], key=("channels", "ROWS", "TRANSPOSED"))


def delayed_cast(
    x: Tensor, largest: Tensor, transposed: bool, straight: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """(payload [r, c] if `straight`, the same transposed [c, r] if `transposed`, scale [], largest magnitude []) of
    x [r, c] by `largest[0]`, that of its past. r is a multiple of 4. Not differentiable."""
    x = last_dim_contiguous(x)
    rows, channels = x.shape
    across, tall = -(-channels // TILE["CB"]), TILE["RB"]
    out = torch.empty((rows, channels), dtype=FLOAT8, device=x.device) if straight else None
    columns = torch.empty((channels, rows), dtype=FLOAT8, device=x.device) if transposed else None
    scale, seen = (x.new_empty(n, dtype=torch.float32) for n in (1, across * -(-rows // tall)))
    _cast(
        lambda meta: (across * -(-rows // meta["RB"]),), TILE, x=x, largest=largest,
        out=largest if out is None else out, transposed=largest if columns is None else columns, scale=scale, seen=seen,
        rows=rows, channels=channels, stride=x.stride(0), across=across, MARGIN=MARGIN, SAMPLE=SAMPLE, ROOM=ROOM,
        ROWS=int(straight), TRANSPOSED=int(transposed), INTERPRETED=interpreted(),
    )  # fmt: skip
    return out, columns, scale.view(()), seen.amax(0)
