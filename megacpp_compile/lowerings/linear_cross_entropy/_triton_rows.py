"""The kernel between the GEMMs: a row of logits becomes its statistics, and then its gradient where it lies.

A program has a row, and goes over its words twice: for the largest logit and the sum of exponentials, which every lane
has of its own words until the end, so that no step waits for another lane; and from the last word to the first for the
gradient, as what was read last is in L2. A row of 131072 words in bfloat16 is 256 KiB: with a program on each of 132
SMs all of them are. Either sweep can be left out: where statistics are known (backward), or where ranks that have other
words of the same rows are to add theirs before any gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, power_of_2

# Words that a program's lanes take side by side, how many such blocks at once, and the warps it has for them.
BLOCK, GROUP, WARPS = 8192, 4, 32


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
def _words(logits, first, words, dtype: tl.constexpr, WORDS: tl.constexpr, ROOM: tl.constexpr, WHOLE: tl.constexpr,
           SCALE: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Logits of the words from `first` on. WHOLE: all of them are there; else those that are not are -inf."""
    if WHOLE:
        return final(tl.load(logits + first + words), dtype, SCALE, SOFTCAP)
    else:
        z = final(tl.load(logits + first + words, mask=first + words < ROOM, other=0), dtype, SCALE, SOFTCAP)
        return tl.where(first + words < WORDS, z, float("-inf"))


@triton.jit
def _counted(z, top, exponentials):
    """One step of every lane's own largest logit and sum of exponentials below it."""
    above = tl.maximum(top, tl.max(z, 0))
    base = tl.where(above == float("-inf"), 0, above)  # so far nothing but -inf
    return above, exponentials * tl.exp(top - base) + tl.sum(tl.exp(z - base[None, :]), 0)


@triton.jit
def _gradient(z, of_row, of_lse, counted, kept, WORDS: tl.constexpr, SMOOTHING: tl.constexpr, SCALE: tl.constexpr,
              SOFTCAP: tl.constexpr, TARGET: tl.constexpr):  # fmt: skip
    """Of a logit as the GEMM made it, 0 unless the row is `kept`. TARGET: that of the row's target."""
    d = tl.exp(z - of_row) * of_lse
    if TARGET:
        d -= (1 - SMOOTHING) * counted
    if SMOOTHING != 0:
        d -= SMOOTHING / WORDS * counted
    if SOFTCAP != 0:
        d = d * (1 - z * z / (SOFTCAP * SOFTCAP))
    if SCALE != 1:
        d = d * SCALE
    return tl.where(kept, d, 0)


@triton.jit
def cross_entropy_rows(logits, target, count, dlse, lse, picked, total, WORDS: tl.constexpr, ROOM: tl.constexpr,
                       SMOOTHING: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, Z_LOSS: tl.constexpr,
                       STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, DLSE: tl.constexpr, WIDE: tl.constexpr,
                       BLOCK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """logits: rows of WORDS in memory for ROOM, so that every load and store is of whole vectors; anything may stand
    behind them, where the gradient is 0. lse, picked (the target's logit) and total (the sum of logits): a number a
    row, written with STATISTICS; without it lse is read. count and dlse: as `reference.gradient` has them."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    SPAN: tl.constexpr = GROUP * BLOCK
    WHOLE: tl.constexpr = WORDS // SPAN * SPAN
    row = tl.program_id(0).to(tl.int64)
    logits += row * ROOM
    words = tl.arange(0, GROUP)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = tl.load(target + row)
    there = (at >= 0) & (at < WORDS)
    own = final(tl.load(logits + at, mask=there, other=0), dtype, SCALE, SOFTCAP)
    if STATISTICS:
        tl.store(picked + row, own)
        top = tl.full([BLOCK], float("-inf"), dtype)
        exponentials = tl.zeros([BLOCK], dtype)
        sums = tl.zeros([BLOCK], dtype)
        for first in range(0, WHOLE, SPAN):
            z = _words(logits, first, words, dtype, WORDS, ROOM, True, SCALE, SOFTCAP)
            if SMOOTHING != 0:
                sums += tl.sum(z, 0)
            top, exponentials = _counted(z, top, exponentials)
        if WHOLE < WORDS:
            z = _words(logits, WHOLE, words, dtype, WORDS, ROOM, False, SCALE, SOFTCAP)
            if SMOOTHING != 0:
                sums += tl.sum(tl.where(WHOLE + words < WORDS, z, 0), 0)
            top, exponentials = _counted(z, top, exponentials)
        largest = tl.max(top, 0)
        base = tl.where(largest == float("-inf"), 0, largest)
        of_row = base + tl.log(tl.sum(exponentials * tl.exp(top - base), 0))
        tl.store(lse + row, of_row)
        if SMOOTHING != 0:
            tl.store(total + row, tl.sum(sums, 0))
    else:
        of_row = tl.load(lse + row)
    if GRADIENT:
        counted = tl.load(count + row)
        of_lse = counted * (1 + 2 * Z_LOSS * of_row)
        kept = counted != 0
        if DLSE:
            of_lse += tl.load(dlse + row)
            kept = kept | (tl.load(dlse + row) != 0)
        tl.debug_barrier()  # all have read `own` before one writes
        if WHOLE < WORDS:
            z = _words(logits, WHOLE, words, dtype, WORDS, ROOM, False, SCALE, SOFTCAP)
            d = _gradient(z, of_row, of_lse, counted, kept, WORDS, SMOOTHING, SCALE, SOFTCAP, False)
            d = tl.where(WHOLE + words < WORDS, d, 0)
            tl.store(logits + WHOLE + words, as_stored(d, logits), mask=WHOLE + words < ROOM)
        for done in range(0, WHOLE, SPAN):
            first = WHOLE - SPAN - done
            z = _words(logits, first, words, dtype, WORDS, ROOM, True, SCALE, SOFTCAP)
            d = _gradient(z, of_row, of_lse, counted, kept, WORDS, SMOOTHING, SCALE, SOFTCAP, False)
            tl.store(logits + first + words, as_stored(d, logits))
        tl.debug_barrier()  # and the block that holds the target is written before it
        d = _gradient(own, of_row, of_lse, counted, kept, WORDS, SMOOTHING, SCALE, SOFTCAP, True)
        tl.store(logits + at, as_stored(d, logits), mask=there)


_CHOICES = [
    {"BLOCK": 256 * warps, "GROUP": group, "num_warps": warps} for warps in (8, 16, 32) for group in (1, 2, 4)
]
_rows = Kernel(cross_entropy_rows, _CHOICES, key=("WORDS",), restore=("logits",), quick=True)


def launch(rows: int, words: int, **args: object) -> None:
    """`cross_entropy_rows` on so many rows of logits."""
    block = min(BLOCK, power_of_2(words))
    group = max(1, min(GROUP, power_of_2(words) // block))
    warps = max(1, min(WARPS, block // 256))
    _rows(lambda meta: (rows,), {"BLOCK": block, "GROUP": group, "num_warps": warps}, WORDS=words, **args)
