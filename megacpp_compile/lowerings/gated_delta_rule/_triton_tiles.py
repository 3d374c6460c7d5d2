"""Triton device code shared by the gated delta rule's kernels: GEMMs, norms, sums of gates, and a chunk's tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import to_bfloat16
from megacpp_compile.lowerings.ssd_scan._triton_gemms import INTERPRETED, gemm


@triton.jit
def dot(a, b, to, WIDE: tl.constexpr):
    """`to + a @ b` in float32 (`to` may be None), of operands rounded to bfloat16, or with `WIDE` kept in float32."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if to is None:
            return gemm(a, b, True)
        else:
            return to + gemm(a, b, True)
    else:
        a, b = to_bfloat16(a), to_bfloat16(b)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, to)


@triton.jit
def chunk_tokens(places, c, tokens, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The first token of chunk c, and one that none of it lies behind; the same token for a chunk that is not there."""
    if DOCUMENTS:
        return tl.load(places + 2 * c), tl.load(places + 2 * c + 1)
    else:
        return c * C, tl.minimum(c * C + C, tokens)


@triton.jit
def inverse_norm(x, eps, NORM: tl.constexpr):
    """1 / the length of each row; ones without `NORM`."""
    x = x.to(tl.float32)
    squares = tl.sum(x * x, 1)
    if NORM:
        return tl.rsqrt(squares + eps)
    else:
        return tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def sums(which, gates, WIDE: tl.constexpr):
    """`which` @ gates, for a matrix of zeros and ones: sums of gates, without the cancelling of a difference of two."""
    if WIDE:
        return gemm(which.to(tl.float32), gates, True)
    else:
        return gemm(which.to(tl.float32).to(tl.bfloat16), gates, False)
