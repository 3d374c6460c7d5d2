"""Triton device code that attention and scans share: exponentials as powers of two, and a product."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, to, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """`to + a @ b`. Triton's interpreter multiplies the bits of bfloat16 as integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, to, input_precision=PRECISION)
