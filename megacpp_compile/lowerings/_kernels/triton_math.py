"""Triton device code that attention, scans and what stands beside them share: exponentials as powers of two, a product,
and a sigmoid."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, to, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """`to + a @ b`. Triton's interpreter multiplies the bits of bfloat16 as integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, to, input_precision=PRECISION)


@triton.jit
def power_of_two(x):
    """2^x in float32, by the GPU's own instruction; Triton puts three around it for what is subnormal, here 0."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """1 / (1 + exp(-x)), with the GPU's own exponential and reciprocal, of 2 and 1 units in the last place of float32;
    Triton puts three instructions around each for what is subnormal, of which here nothing is left. EXACT: by the
    definition, in x's dtype, which is all that the interpreter knows."""
    if EXACT:
        s = 1 / (1 + tl.exp(-x))
    else:
        s = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, e; }", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return s
