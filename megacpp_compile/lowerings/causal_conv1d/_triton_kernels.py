"""The Triton kernels of `causal_conv1d`: `cuda_triton.py` says how they divide the work."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_math import sigmoid


@triton.jit
def causal_conv1d_tile(x, weight, bias, seq_idx, y, steps, channels, xb, xt, wc, wk, bias_c, sb, st, yb, yt,
                       TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, WIDE: tl.constexpr,
                       EXACT: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    b = tl.program_id(2).to(tl.int64)
    exists = c < channels
    total = tl.zeros([BT, BC], dtype)
    if BIAS:
        total += tl.load(bias + c * bias_c, mask=exists, other=0).to(dtype)
    if PACKED:
        own = tl.load(seq_idx + b * sb + t.to(tl.int64) * st, mask=t < steps, other=0)
    for j in tl.static_range(TAPS):
        at = t - (TAPS - 1 - j)
        w = tl.load(weight + c * wc + j * wk, mask=exists, other=0).to(dtype)
        tap = tl.load(x + b * xb + at.to(tl.int64) * xt + c, mask=exists & (at >= 0) & (at < steps), other=0).to(dtype)
        if PACKED:
            seen = tl.load(seq_idx + b * sb + at.to(tl.int64) * st, mask=(at >= 0) & (at < steps), other=0)
            tap = tl.where(seen == own, tap, 0)
        total += w * tap
    if SILU:
        total = total * sigmoid(total, EXACT)
    tl.store(y + b * yb + t.to(tl.int64) * yt + c, as_stored(total, y), mask=exists & (t < steps))


@triton.jit
def _own(steps, channels, SEGMENT: tl.constexpr, BC: tl.constexpr):
    """Of a program: its segment, channels, and sequence, which channels exist, and where its steps begin and end."""
    segment = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    exists = c < channels
    # One for every channel: Triton's interpreter (3.9) can't broadcast a truth value over channels.
    begin = segment * SEGMENT + tl.zeros([BC], tl.int32)
    return segment, c, b, exists, begin, tl.minimum(begin + SEGMENT, steps)


@triton.jit
def _weights(weight, c, exists, wc, wk, dtype: tl.constexpr, TAPS: tl.constexpr):
    """Of the newest operand and of those before it; 0 beyond the taps."""
    w0 = tl.load(weight + c * wc + (TAPS - 1) * wk, mask=exists, other=0).to(dtype)
    w1 = tl.load(weight + c * wc + (TAPS - 2) * wk, mask=exists, other=0).to(dtype)
    w2, w3 = tl.zeros_like(w0), tl.zeros_like(w0)
    if TAPS > 2:
        w2 = tl.load(weight + c * wc + (TAPS - 3) * wk, mask=exists, other=0).to(dtype)
    if TAPS > 3:
        w3 = tl.load(weight + c * wc + (TAPS - 4) * wk, mask=exists, other=0).to(dtype)
    return w0, w1, w2, w3


@triton.jit
def _before(x, xt, c, begin, exists, dtype: tl.constexpr, TAPS: tl.constexpr):
    """The operands of the steps before `begin`, at which x points: the last first."""
    x1 = tl.load(x - xt + c, mask=exists & (begin >= 1), other=0).to(dtype)
    x2, x3 = tl.zeros_like(x1), tl.zeros_like(x1)
    if TAPS > 2:
        x2 = tl.load(x - 2 * xt + c, mask=exists & (begin >= 2), other=0).to(dtype)
    if TAPS > 3:
        x3 = tl.load(x - 3 * xt + c, mask=exists & (begin >= 3), other=0).to(dtype)
    return x1, x2, x3


@triton.jit
def _documents_before(seq_idx, st, begin):
    i1 = tl.load(seq_idx + (begin - 1).to(tl.int64) * st, mask=begin >= 1, other=0)
    i2 = tl.load(seq_idx + (begin - 2).to(tl.int64) * st, mask=begin >= 2, other=0)
    i3 = tl.load(seq_idx + (begin - 3).to(tl.int64) * st, mask=begin >= 3, other=0)
    return i1, i2, i3


@triton.jit
def _four(x, xt, c, t, end, exists):
    """Rows of four steps from t on, at which x points; 0 from `end` on."""
    x0 = tl.load(x + c, mask=exists & (t < end), other=0)
    x1 = tl.load(x + xt + c, mask=exists & (t + 1 < end), other=0)
    x2 = tl.load(x + 2 * xt + c, mask=exists & (t + 2 < end), other=0)
    x3 = tl.load(x + 3 * xt + c, mask=exists & (t + 3 < end), other=0)
    return x0, x1, x2, x3


@triton.jit
def causal_conv1d_steps(x, weight, bias, seq_idx, y, steps, channels, xb, xt, wc, wk, bias_c, sb, st, yb, yt,
                        TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, WIDE: tl.constexpr,
                        EXACT: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
                        BC: tl.constexpr):  # fmt: skip
    """`x0` is the newest operand of a step, `w0` its weight."""
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    segment, c, b, exists, begin, last = _own(steps, channels, SEGMENT, BC)
    x += b * xb + (segment * SEGMENT).to(tl.int64) * xt
    y += b * yb + (segment * SEGMENT).to(tl.int64) * yt
    w0, w1, w2, w3 = _weights(weight, c, exists, wc, wk, dtype, TAPS)
    x1, x2, x3 = _before(x, xt, c, begin, exists, dtype, TAPS)
    shift = tl.zeros([BC], dtype)
    if BIAS:
        shift = tl.load(bias + c * bias_c, mask=exists, other=0).to(dtype)
    if PACKED:
        seq_idx += b * sb
        i1, i2, i3 = _documents_before(seq_idx, st, begin)
    ahead0, ahead1, ahead2, ahead3 = _four(x, xt, c, begin, last, exists)
    for i in range(0, tl.minimum(SEGMENT, steps - segment * SEGMENT), 4):
        now0, now1, now2, now3 = ahead0, ahead1, ahead2, ahead3
        x += 4 * xt
        t = begin + i
        ahead0, ahead1, ahead2, ahead3 = _four(x, xt, c, t + 4, last, exists)
        for j in tl.static_range(4):
            x0 = (now0 if j == 0 else now1 if j == 1 else now2 if j == 2 else now3).to(dtype)
            if PACKED:
                i0 = tl.load(seq_idx + (t + j).to(tl.int64) * st, mask=t + j < steps, other=0)
                s1, s2, s3 = tl.where(i1 == i0, x1, 0), tl.where(i2 == i0, x2, 0), tl.where(i3 == i0, x3, 0)
                i3, i2, i1 = i2, i1, i0
            else:
                s1, s2, s3 = x1, x2, x3
            total = shift + w0 * x0 + w1 * s1
            if TAPS > 2:
                total += w2 * s2
            if TAPS > 3:
                total += w3 * s3
            if SILU:
                total = total * sigmoid(total, EXACT)
            tl.store(y + c, as_stored(total, y), mask=exists & (t + j < last))
            y += yt
            x3, x2, x1 = x2, x1, x0


@triton.jit
def causal_conv1d_walk(grad, x, weight, bias, seq_idx, dx, partial, steps, channels, segments, gb, gt, xb, xt, wc, wk,
                       bias_c, sb, st, db, dt, dx_first, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
                       WIDE: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
                       BC: tl.constexpr):  # fmt: skip
    """Rows of `partial` [b * segments, TAPS + 1, channels]: each tap's weight gradient, then the bias'. `dx` is written
    from column `dx_first` on.

    `w0` belongs to the newest operand `x0`; `g0` is the gradient of the step being walked, `g1` of the one before.
    Step i of the walk writes the input gradient of the step TAPS - 1 before it.
    """
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    segment, c, b, exists, begin, last = _own(steps, channels, SEGMENT, BC)
    end = tl.minimum(begin + SEGMENT + TAPS - 1, steps)
    # Pointers to the rows of the walk's first step, which go on with it.
    x += b * xb + (segment * SEGMENT).to(tl.int64) * xt
    grad += b * gb + (segment * SEGMENT).to(tl.int64) * gt
    dx += b * db + dx_first + (segment * SEGMENT - (TAPS - 1)).to(tl.int64) * dt
    zero = tl.zeros([BC], dtype)
    w0, w1, w2, w3 = _weights(weight, c, exists, wc, wk, dtype, TAPS)
    x1, x2, x3 = _before(x, xt, c, begin, exists, dtype, TAPS)
    shift = zero
    if BIAS:
        shift = tl.load(bias + c * bias_c, mask=exists, other=0).to(dtype)
    # Zeros that no compiler knows to be zeros: from one and the same constant in all three Triton 3.6 makes g2 and g3
    # that constant for the whole walk.
    g1 = tl.load(grad - gt + c, mask=exists & (begin < 0), other=0).to(dtype)
    g2 = tl.load(grad - 2 * gt + c, mask=exists & (begin < 0), other=0).to(dtype)
    g3 = tl.load(grad - 3 * gt + c, mask=exists & (begin < 0), other=0).to(dtype)
    if PACKED:  # the documents of the steps before, as of their operands
        seq_idx += b * sb
        i1, i2, i3 = _documents_before(seq_idx, st, begin)
    dw0, dw1, dw2, dw3, d_shift = zero, zero, zero, zero, zero
    # Four steps at a time, so that what is passed on from one to the next stays in its registers; their operands and
    # gradients are loaded ahead of the four before them.
    ahead_x0, ahead_x1, ahead_x2, ahead_x3 = _four(x, xt, c, begin, end, exists)
    ahead_g0, ahead_g1, ahead_g2, ahead_g3 = _four(grad, gt, c, begin, end, exists)
    for i in range(0, tl.minimum(SEGMENT, steps - segment * SEGMENT) + TAPS - 1, 4):
        now_x0, now_x1, now_x2, now_x3 = ahead_x0, ahead_x1, ahead_x2, ahead_x3
        now_g0, now_g1, now_g2, now_g3 = ahead_g0, ahead_g1, ahead_g2, ahead_g3
        x += 4 * xt
        grad += 4 * gt
        t = begin + i
        ahead_x0, ahead_x1, ahead_x2, ahead_x3 = _four(x, xt, c, t + 4, end, exists)
        ahead_g0, ahead_g1, ahead_g2, ahead_g3 = _four(grad, gt, c, t + 4, end, exists)
        for j in tl.static_range(4):
            x0 = (now_x0 if j == 0 else now_x1 if j == 1 else now_x2 if j == 2 else now_x3).to(dtype)
            g0 = (now_g0 if j == 0 else now_g1 if j == 1 else now_g2 if j == 2 else now_g3).to(dtype)
            if PACKED:
                i0 = tl.load(seq_idx + (t + j).to(tl.int64) * st, mask=t + j < steps, other=0)
                s1, s2, s3 = tl.where(i1 == i0, x1, 0), tl.where(i2 == i0, x2, 0), tl.where(i3 == i0, x3, 0)
            else:
                s1, s2, s3 = x1, x2, x3
            if SILU:
                pre = shift + w0 * x0 + w1 * s1
                if TAPS > 2:
                    pre += w2 * s2
                if TAPS > 3:
                    pre += w3 * s3
                s = sigmoid(pre, EXACT)
                g0 = g0 * (s * (1 + pre * (1 - s)))
            # Behind the segment only the input gradients are this program's.
            mine = tl.where(t + j < last, g0, 0)
            dw0 += mine * x0
            dw1 += mine * s1
            d_shift += mine
            # Gradients of the steps that see the one whose input gradient is written.
            h0, h1, h2 = g0, g1, g2
            if PACKED:
                target = i3 if TAPS > 3 else (i2 if TAPS > 2 else i1)
                h0 = tl.where(i0 == target, g0, 0)
                h1 = tl.where(i1 == target, g1, 0)
                h2 = tl.where(i2 == target, g2, 0)
            out = w0 * h1 + w1 * h0
            if TAPS > 2:
                dw2 += mine * s2
                out = w0 * h2 + w1 * h1 + w2 * h0
            if TAPS > 3:
                dw3 += mine * s3
                out = w0 * g3 + w1 * h2 + w2 * h1 + w3 * h0
            at = t + j - (TAPS - 1)
            tl.store(dx + c, as_stored(out, dx), mask=exists & (at >= begin) & (at < last))
            dx += dt
            x3, x2, x1 = x2, x1, x0
            if PACKED:
                i3, i2, i1 = i2, i1, i0
            g3, g2, g1 = g2, g1, g0
    partial += (b * segments + segment) * (TAPS + 1) * channels + c
    tl.store(partial + (TAPS - 1) * channels, dw0, mask=exists)
    tl.store(partial + (TAPS - 2) * channels, dw1, mask=exists)
    if TAPS > 2:
        tl.store(partial + (TAPS - 3) * channels, dw2, mask=exists)
    if TAPS > 3:
        tl.store(partial + (TAPS - 4) * channels, dw3, mask=exists)
    tl.store(partial + TAPS * channels, d_shift, mask=exists)
