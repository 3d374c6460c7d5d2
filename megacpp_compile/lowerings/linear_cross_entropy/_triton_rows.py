"""The kernel between the GEMMs: a row of logits becomes its statistics, and then its gradient where it lies.

A program has a row, and goes over its words in blocks: once for the largest logit and the sum of exponentials, with one
exponential a word, and once for the gradient. A row of 131072 words in bfloat16 is 256 KiB, which the second sweep
finds in L2. Either sweep can be left out: where statistics are known (backward), or where ranks that have other words
of the same rows are to add theirs before any gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, power_of_2

# Words that a program takes at once, and the warps it has for them.
BLOCK, WARPS = 8192, 16


@triton.jit
def tanh(x):
    """Exact to some roundings near zero too, where 1 - exp(-2 |x|) has lost its digits."""
    NEAR: tl.constexpr = 1e-3 if x.dtype == tl.float64 else 0.0625
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835 - x2 * (1382 / 155925))))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(x2 < NEAR, series, tl.where(x < 0, -far, far))


@triton.jit
def final(logits, dtype: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logits that softmax is taken of. SOFTCAP is 0 for none."""
    z = logits.to(dtype)
    if SCALE != 1:
        z = z * SCALE
    if SOFTCAP != 0:
        z = SOFTCAP * tanh(z / SOFTCAP)
    return z


@triton.jit
def cross_entropy_rows(logits, target, count, dlse, lse, picked, total, WORDS: tl.constexpr, ROOM: tl.constexpr,
                       SMOOTHING: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, Z_LOSS: tl.constexpr,
                       STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, DLSE: tl.constexpr, WIDE: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """logits: rows of WORDS in memory for ROOM, where anything may stand and be written behind them, so that every load
    and store is of whole vectors. lse, picked (the target's logit) and total (the sum of logits): a number a row,
    written with STATISTICS; without it lse is read. count and dlse: as `reference.gradient` has them."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    logits += row * ROOM
    words = tl.arange(0, BLOCK)
    at = tl.load(target + row)
    if STATISTICS:
        own = tl.load(logits + at, mask=(at >= 0) & (at < WORDS), other=0)
        tl.store(picked + row, final(own, dtype, SCALE, SOFTCAP))
        top = tl.full([], float("-inf"), dtype)
        exponentials = tl.zeros([BLOCK], dtype)
        sums = tl.zeros([BLOCK], dtype)
        for first in range(0, WORDS, BLOCK):
            inside = first + words < WORDS
            z = final(tl.load(logits + first + words, mask=first + words < ROOM, other=0), dtype, SCALE, SOFTCAP)
            if SMOOTHING != 0:
                sums += tl.where(inside, z, 0)
            z = tl.where(inside, z, float("-inf"))
            above = tl.maximum(top, tl.max(z, 0))
            base = tl.where(above == float("-inf"), 0, above)  # so far nothing but -inf
            exponentials = exponentials * tl.exp(top - base) + tl.exp(z - base)
            top = above
        of_row = top + tl.log(tl.sum(exponentials, 0))
        tl.store(lse + row, of_row)
        if SMOOTHING != 0:
            tl.store(total + row, tl.sum(sums, 0))
    else:
        of_row = tl.load(lse + row)
    if GRADIENT:
        counted = tl.load(count + row)
        of_lse = counted * (1 + 2 * Z_LOSS * of_row)
        if DLSE:
            of_lse += tl.load(dlse + row)
        for first in range(0, WORDS, BLOCK):
            there = first + words < ROOM
            z = final(tl.load(logits + first + words, mask=there, other=0), dtype, SCALE, SOFTCAP)
            d = tl.exp(z - of_row) * of_lse
            d = tl.where(first + words == at, d - (1 - SMOOTHING) * counted, d)
            if SMOOTHING != 0:
                d -= SMOOTHING / WORDS * counted
            if SOFTCAP != 0:
                d = d * (1 - z * z / (SOFTCAP * SOFTCAP))
            if SCALE != 1:
                d = d * SCALE
            tl.store(logits + first + words, as_stored(d, logits), mask=there)


_CHOICES = [{"BLOCK": block, "num_warps": warps} for block in (4096, 8192, 16384) for warps in (8, 16, 32)]
_rows = Kernel(cross_entropy_rows, _CHOICES, key=("WORDS",), restore=("logits",))


def launch(rows: int, words: int, **args: object) -> None:
    """`cross_entropy_rows` on so many rows of logits."""
    block = min(BLOCK, power_of_2(words))
    warps = max(1, min(WARPS, block // 256))
    _rows(lambda meta: (rows,), {"BLOCK": block, "num_warps": warps}, WORDS=words, **args)
