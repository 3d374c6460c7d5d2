"""Triton device code: GEMMs that keep float32 operands nearly exact on bfloat16 tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_launch import interpreted

# Triton's interpreter keeps bfloat16 as integers, and multiplies matrices of those (triton 3.9).
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def gemm(a, b, WIDE: tl.constexpr):
    """`a @ b` in float32. bfloat16 operands are exact; any other is taken apart into two bfloat16 numbers, high + low.

    That keeps 16 bits of a float32 factor (all 11 of float16), where TF32 keeps 11 and wants its operands laid out
    anew. `WIDE`: both operands are float32 and stay so, as three TF32 GEMMs; of tiles of 16, those lose digits
    (Triton 3.6).
    """
    if WIDE and (a.shape[0] == 16 or a.shape[1] == 16 or b.shape[1] == 16):
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        return _add(a, b, None)
    elif b.dtype == tl.bfloat16:
        high, low = _halves(a)
        return _add(high, b, _add(low, b, None))
    elif a.dtype == tl.bfloat16:
        high, low = _halves(b)
        return _add(a, high, _add(a, low, None))
    else:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        return _add(a_high, b_high, _add(a_high, b_low, _add(a_low, b_high, None)))


@triton.jit
def _halves(a):
    """The upper half of a float32's bits is a bfloat16, cut off: rounding one number at a time is slow on the GPU."""
    a = a.to(tl.float32)
    high = (a.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (a - high).to(tl.bfloat16)


@triton.jit
def _add(a, b, to):
    """`to + a @ b`, of bfloat16."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, to)
