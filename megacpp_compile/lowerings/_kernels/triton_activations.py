"""Activations of a gated MLP inside of kernels: their values, their derivatives, and what a gate makes of up."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_math import sigmoid


@triton.jit
def with_slope(gate, NAME: tl.constexpr, EXACT: tl.constexpr = True):
    """(an activation, its derivative); Triton drops the one that a kernel does not use. EXACT: see `sigmoid`."""
    if NAME == "silu":
        s = sigmoid(gate, EXACT)
        return gate * s, s * (1 + gate * (1 - s))
    elif NAME == "gelu":
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        return gate * below, below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    elif NAME == "gelu_tanh":
        s = sigmoid(2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate), EXACT)
        inner = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
        return gate * s, s + 2 * gate * s * (1 - s) * inner
    elif NAME == "relu":
        return tl.where(gate <= 0, 0.0, gate), tl.where(gate > 0, 1.0, 0.0).to(gate.dtype)
    else:
        tl.static_assert(NAME == "relu2")
        positive = tl.where(gate <= 0, 0.0, gate)  # a maximum with 0 would take NaN for 0
        return positive * positive, 2 * positive


@triton.jit
def _bounded(h, LOW: tl.constexpr, HIGH: tl.constexpr, AT_AN_END: tl.constexpr):
    """(h between LOW and HIGH, its derivative). NaN stays NaN, and is not between them."""
    BETWEEN: tl.constexpr = LOW is not None or HIGH is not None
    slope = tl.where(h == h, 1.0, 0.0 if BETWEEN else 1.0)  # `full` would want a layout in Gluon
    if HIGH is not None:
        slope = tl.where(h > HIGH, 0.0, slope if AT_AN_END == 1 else tl.where(h == HIGH, AT_AN_END, slope))
        h = tl.where(h > HIGH, HIGH, h)
    if LOW is not None:
        slope = tl.where(h < LOW, 0.0, slope if AT_AN_END == 1 else tl.where(h == LOW, AT_AN_END, slope))
        h = tl.where(h < LOW, LOW, h)
    return h, slope.to(h.dtype)


@triton.jit
def factors(gate, up, NAME: tl.constexpr, CURVE: tl.constexpr, EXACT: tl.constexpr = True):
    """(the factor that gate makes, its derivative, the factor that up makes, its derivative), see `Activation`."""
    if CURVE is None:
        f, slope = with_slope(gate, NAME, EXACT)
        return f, slope, up, 1.0
    else:
        return _bounded_factors(gate, up, NAME, CURVE, EXACT)


@triton.jit
def _bounded_factors(gate, up, NAME: tl.constexpr, CURVE: tl.constexpr, EXACT: tl.constexpr):
    gate, before = _bounded(gate, CURVE[2], CURVE[3], CURVE[4])
    if CURVE[0] != 1:
        s = sigmoid(gate * CURVE[0], EXACT)
        f = gate * s
        slope = s * (1 + gate * CURVE[0] * (1 - s))
    else:
        f, slope = with_slope(gate, NAME, EXACT)
    f, behind = _bounded(f, CURVE[5], CURVE[6], CURVE[7])
    up, up_slope = _bounded(up, CURVE[8], CURVE[9], CURVE[10])
    slope = tl.where((before == 0) | (behind == 0), 0.0, slope * before * behind)
    return f, slope, up + CURVE[1], up_slope


@triton.jit
def passed_on(gradient, slope, NAME: tl.constexpr, CURVE: tl.constexpr):
    """See `_activation.passed_on`."""
    if CURVE is not None or NAME == "relu" or NAME == "relu2":
        gradient = tl.where(slope == 0, 0.0, gradient)
    return gradient


@triton.jit
def product(gate, up, NAME: tl.constexpr, CURVE: tl.constexpr, EXACT: tl.constexpr = True):
    """f(gate) * up, see `Activation`."""
    f, _, factor, _ = factors(gate, up, NAME, CURVE, EXACT)
    return f * factor
