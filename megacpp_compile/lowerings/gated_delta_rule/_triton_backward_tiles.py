"""Triton device code that the backward kernels of `gated_delta_rule` share: GEMMs, where a chunk lies, its decays."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import INTERPRETED, to_bfloat16
from megacpp_compile.lowerings.gated_delta_rule._triton_tiles import inverse_norm


@triton.jit
def operand(x, WIDE: tl.constexpr):
    """`x` as GEMMs take it: float32 if WIDE, else bfloat16."""
    if WIDE:
        return x.to(tl.float32)
    else:
        return to_bfloat16(x)


@triton.jit
def product(a, b, WIDE: tl.constexpr):
    """`a @ b` in float32, of operands in bfloat16, or WIDE: in float32 as three TF32 GEMMs; of tiles of 16, those lose
    digits (Triton 3.6)."""
    a, b = operand(a, WIDE), operand(b, WIDE)
    if INTERPRETED:  # which keeps bfloat16 as integers, and multiplies matrices of those (triton 3.9)
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif WIDE and (a.shape[0] == 16 or a.shape[1] == 16 or b.shape[1] == 16):
        return tl.dot(a, b, input_precision="ieee")
    elif WIDE:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def as_multiplied(rows, WIDE: tl.constexpr):
    """Rows as GEMMs had them, in float32. A pair of tokens gives nothing to gates that are not between the two: what it
    adds in the reader's row is taken away in the writer's, and equals it if neither was rounded anew."""
    return operand(rows, WIDE).to(tl.float32)


@triton.jit
def add_product(to, a, b, WIDE: tl.constexpr):
    """`to + a @ b`, as `product`."""
    a, b = operand(a, WIDE), operand(b, WIDE)
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), to, input_precision="ieee")
    elif WIDE and (a.shape[0] == 16 or a.shape[1] == 16 or b.shape[1] == 16):
        return tl.dot(a, b, to, input_precision="ieee")
    elif WIDE:
        return tl.dot(a, b, to, input_precision="tf32x3")
    else:
        return tl.dot(a, b, to)


@triton.jit
def chunk_and_head(chunks):
    """Of a program. Chunks run fastest: on an H100 kernels take a quarter less time than with heads fastest."""
    pid = tl.program_id(0)
    return pid % chunks, (pid // chunks).to(tl.int64)


@triton.jit
def chunk_tokens(table, c, tokens, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of chunk `c` (64 bits), and how many follow of its document, or of the sequence (32 bits).

    Addresses are the first token's, a number, plus 32-bit offsets: tiles of 64-bit ones fill the registers.
    """
    if PACKED:
        first, end = tl.load(table + 2 * c), tl.load(table + 2 * c + 1)
        return first.to(tl.int64), end - first
    else:
        return c.to(tl.int64) * C, tokens - c * C


@triton.jit
def normed(x, x_t, length, eps, C: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr):
    """Rows of queries or keys in float32, times what normalises them, and that."""
    r, n = tl.arange(0, C)[:, None], tl.arange(0, K)[None, :]
    rows = tl.load(x + (r * x_t + n), mask=r < length, other=0).to(tl.float32)
    norm = inverse_norm(rows, eps, NORM)
    return rows * norm[:, None], norm


@triton.jit
def through_norm(grad, unit, norm, NORM: tl.constexpr):
    """The gradient of rows from that of `unit` = rows * norm, norm = (|row|^2 + eps)^-1/2."""
    if NORM:
        return (grad - unit * tl.sum(unit * grad, 1)[:, None]) * norm[:, None]
    else:
        return grad


@triton.jit
def end_of(ends, row, which: tl.constexpr, there, K: tl.constexpr):
    """Number `which` of the three powers of 2 [K] of chunk and head `row` (`_triton_small_decay`); 0 unless `there` >
    0."""
    n = tl.arange(0, K)
    return tl.load(ends + (row * 3 + which) * K + n, mask=n * 0 + there > 0, other=0)


@triton.jit
def from_behind(x):
    """Sums over a row and all behind it."""
    return tl.sum(x, 0)[None, :] - tl.cumsum(x, 0) + x
