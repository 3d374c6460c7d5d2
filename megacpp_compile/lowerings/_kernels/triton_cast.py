"""Triton device code: a computed value in the dtype of the memory it goes to, and numbers given to a kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_launch import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def as_stored(x, pointer):
    """`x` in `pointer`'s element type. float64 goes to half precision by way of float32: Triton's interpreter gets the
    direct conversion to bfloat16 wrong (triton 3.9)."""
    if x.dtype == tl.float64 and pointer.dtype.element_ty.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    if pointer.dtype.element_ty == tl.bfloat16:
        return to_bfloat16(x)
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def to_bfloat16(x):
    """`x` rounded to the nearest, as GPUs do; Triton's interpreter cuts float32 off (triton 3.9)."""
    if INTERPRETED and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -65536).to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def single(number):
    """A float argument of a kernel, in float32: Inductor passes it in float64 (torch 2.11 to 2.14, pytorch#190340),
    and what it is multiplied by would be float64 too."""
    return tl.cast(number, tl.float32)
