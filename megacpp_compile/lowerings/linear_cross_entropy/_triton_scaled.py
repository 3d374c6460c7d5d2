"""A tensor times a number on the device, in its own memory, rounded once; what is 0 stays so."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_cast import as_stored

_BLOCK, _WARPS = 8192, 8


@triton.jit
def scale(to, factor, SIZE, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(factor)
    x = tl.load(to + at, mask=at < SIZE, other=0).to(number.dtype)
    tl.store(to + at, as_stored(tl.where(x == 0, x, x * number), to), mask=at < SIZE)


def scale_in_place(t: Tensor, factor: Tensor) -> None:
    """t: contiguous; factor: [], in float32 or float64."""
    scale[(triton.cdiv(t.numel(), _BLOCK),)](t, factor, t.numel(), _BLOCK, num_warps=_WARPS)
