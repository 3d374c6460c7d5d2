"""Triton device code all RoPE kernels share: where a token's rows lie, its angles, and the turn itself.

Geometry (`rows.py` works it out on the host). A tensor `[..., channels]` is seen as tokens x heads x channels: token
`t` is the pair of coordinates `(t // n1, t % n1)`, each with its own stride; tables do not depend on the head. A
program owns `BT` tokens and `BH` heads, and nobody else touches their rows, which is what makes working in place safe
across programs. Within one, `IN_PLACE` separates the reads from the writes by a barrier: with interleaved pairs going
in and halves coming out, a channel is written by another thread than the one that reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored


@triton.jit
def tokens_of(pid, tokens, n1, BT: tl.constexpr):
    """This program's tokens, their two coordinates in 64 bits, and which of them exist."""
    t = pid * BT + tl.arange(0, BT)
    return t, (t // n1).to(tl.int64), (t % n1).to(tl.int64), t < tokens


@triton.jit
def heads_of(pid, heads, BH: tl.constexpr):
    h = pid * BH + tl.arange(0, BH)
    return h.to(tl.int64), h < heads


@triton.jit
def position_in_sequence(t, ok, cu_seqlens, sequences, rows, STEPS: tl.constexpr):
    """Packed tokens: how far `t` is behind the last boundary at or before it (a binary search), at most `rows - 1`.

    0 before the first boundary, so that nothing is read outside of the tables.
    """
    low = t * 0
    high = low + sequences + 1
    for _ in range(STEPS):
        middle = (low + high) // 2
        left = tl.load(cu_seqlens + middle, mask=ok & (middle <= sequences), other=0) <= t
        low = tl.where(left, middle, low)
        high = tl.where(left, high, middle)
    start = tl.load(cu_seqlens + low, mask=ok, other=0)
    return tl.minimum(tl.maximum(t - start, 0), rows - 1).to(tl.int64)


@triton.jit
def angles(table, at, lane_stride, ok, FULL: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr,
           LANES: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """A table's entries for both channels of every pair, [BT, 1, LANES]; `FULL` tables hold one an output channel."""
    d = tl.arange(0, LANES)[None, :]
    mask = ok[:, None] & (d < HALF)
    base = table + at[:, None]
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    if FULL and INTERLEAVED:
        first = tl.load(base + 2 * d * lane_stride, mask=mask, other=0).to(dtype)
        second = tl.load(base + (2 * d + 1) * lane_stride, mask=mask, other=0).to(dtype)
    elif FULL:
        first = tl.load(base + d * lane_stride, mask=mask, other=0).to(dtype)
        second = tl.load(base + (d + HALF) * lane_stride, mask=mask, other=0).to(dtype)
    else:
        first = tl.load(base + d * lane_stride, mask=mask, other=0).to(dtype)
        second = first
    return first[:, None, :], second[:, None, :]


@triton.jit
def load_pairs(base, rows, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
               BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Both channels of every pair of the rows at pointers `base` [BT, BH], each [BT, BH, LANES], masked by `rows`."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    if INTERLEAVED:
        d = tl.arange(0, 2 * LANES)[None, None, :]
        x = tl.load(base[:, :, None] + d, mask=rows[:, :, None] & (d < 2 * HALF), other=0)
        x1, x2 = tl.split(tl.reshape(x, (BT, BH, LANES, 2)))
    else:
        d = tl.arange(0, LANES)[None, None, :]
        mask = rows[:, :, None] & (d < HALF)
        x1 = tl.load(base[:, :, None] + d, mask=mask, other=0)
        x2 = tl.load(base[:, :, None] + (d + HALF), mask=mask, other=0)
    return x1.to(dtype), x2.to(dtype)


@triton.jit
def store_pairs(base, rows, y1, y2, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
                BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Write both channels of every pair to the rows at pointers `base` [BT, BH]; y1 and y2 broadcast over heads."""
    y1 = tl.broadcast_to(as_stored(y1, base), (BT, BH, LANES))
    y2 = tl.broadcast_to(as_stored(y2, base), (BT, BH, LANES))
    if INTERLEAVED:
        d = tl.arange(0, 2 * LANES)[None, None, :]
        y = tl.reshape(tl.join(y1, y2), (BT, BH, 2 * LANES))
        tl.store(base[:, :, None] + d, y, mask=rows[:, :, None] & (d < 2 * HALF))
    else:
        d = tl.arange(0, LANES)[None, None, :]
        mask = rows[:, :, None] & (d < HALF)
        tl.store(base[:, :, None] + d, y1, mask=mask)
        tl.store(base[:, :, None] + (d + HALF), y2, mask=mask)


@triton.jit
def turn(x1, x2, c1, c2, s1, s2, INVERSE: tl.constexpr):
    """Rotate pairs by their angles; `INVERSE` is the transpose, also where cos² + sin² is not 1.

    The fused multiply-adds are spelt out, so that every kernel rounds alike: left to the compiler, which product is
    fused would depend on what stands around.
    """
    if INVERSE:
        return tl.fma(x1, c1, x2 * s2), tl.fma(x2, c2, -(x1 * s1))
    else:
        return tl.fma(x1, c1, -(x2 * s1)), tl.fma(x2, c2, x1 * s2)


@triton.jit
def copy_rows(source, target, rows, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Copy `WIDTH` channels of the rows at pointers `source` to those at `target`, both [BT, BH]."""
    d = tl.arange(0, LANES)[None, None, :]
    mask = rows[:, :, None] & (d < WIDTH)
    x = tl.load(source[:, :, None] + d, mask=mask, other=0)
    tl.store(target[:, :, None] + d, as_stored(x, target), mask=mask)


@triton.jit
def turn_heads(source, target, t_pid, h_pid, tokens, n1, heads, xa, xb, xh, ya, yb, yh,
               cos, sin, ca, cb, cl, sa, sb, sl, cu_seqlens, sequences, positions,
               NOPE: tl.constexpr, NOPE_LANES: tl.constexpr, ROPE_FIRST: tl.constexpr,
               HALF: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr, LOAD_INTERLEAVED: tl.constexpr,
               STORE_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
               WIDE: tl.constexpr, IN_PLACE: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
               BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """A block of whole heads from `source` to `target`: rope channels rotated, the others copied unless in place."""
    ROPE_AT: tl.constexpr = 0 if ROPE_FIRST else NOPE
    NOPE_AT: tl.constexpr = 2 * HALF if ROPE_FIRST else 0
    t, a, b, ok = tokens_of(t_pid, tokens, n1, BT)
    h, exists = heads_of(h_pid, heads, BH)
    rows = ok[:, None] & exists[None, :]
    if PACKED:
        position = position_in_sequence(t, ok, cu_seqlens, sequences, positions, STEPS)
        at_cos, at_sin = position * cb, position * sb
    else:
        at_cos, at_sin = a * ca + b * cb, a * sa + b * sb
    c1, c2 = angles(cos, at_cos, cl, ok, FULL, TABLE_INTERLEAVED, HALF, LANES, WIDE)
    s1, s2 = angles(sin, at_sin, sl, ok, FULL, TABLE_INTERLEAVED, HALF, LANES, WIDE)
    x = source + (a * xa + b * xb)[:, None] + (h * xh)[None, :]
    y = target + (a * ya + b * yb)[:, None] + (h * yh)[None, :]
    x1, x2 = load_pairs(x + ROPE_AT, rows, LOAD_INTERLEAVED, HALF, LANES, WIDE, BT, BH)
    y1, y2 = turn(x1, x2, c1, c2, s1, s2, INVERSE)
    if IN_PLACE:
        tl.debug_barrier()
    elif NOPE > 0:
        copy_rows(x + NOPE_AT, y + NOPE_AT, rows, NOPE, NOPE_LANES)
    store_pairs(y + ROPE_AT, rows, y1, y2, STORE_INTERLEAVED, HALF, LANES, BT, BH)
