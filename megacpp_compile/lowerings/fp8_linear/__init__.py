"""`megacpp::fp8_linear`: linears that share an input, their GEMMs in float8, each operand with one scale of its own.

    fp8_quantize(x, format)     payload, x's shape in float8, and scale_inv [], float32: x = payload * scale_inv.
                                format "e4m3" or "e5m2"; the scale comes from the values x has now ("current scaling")
    fp8_quantize_transposed(x, format)
                                the same in both orientations: the payload, that as [k, rows], and the scale
    fp8_quantize_delayed(x, largest, format, transposed)
                                `fp8_quantize` by "delayed scaling", and the cast is one pass: the scale leaves room for
                                twice `largest[0]`, the largest magnitude that x's past held; where that is 0, as it is
                                before there is a past, it comes from a sample of x. Returns the payload, with
                                `transposed` also that as [k, rows] (else empty), the scale, and the largest magnitude
                                of x now []
    push_maxima(history, latest, grads)
                                history [h, n] with a row more, `latest` [m] and `grads` (n - m of []), and its oldest
                                row less; and the largest of each column, over and over [n, ALIGNED], so that a kernel
                                may be given a row. What is not finite counts as 0
    fp8_linear(x, weights, x8, x_scale_inv, w8, w_scale_inv, biases, grad_format, out_dtype, grad_largest, grad_seen,
               x_transposed, weight_grad, w_transposed)
        x           [..., k]; takes the gradient, and is not read
        weights     one [n_i, k] of each linear; they take the gradients, and are read in backward only
        x8, w8      the payloads in e4m3 of x and of all weights, one below the other [n, k], with their scales
        biases      one [n_i] of each linear, or none
        grad_largest, grad_seen     with delayed scaling: what scales the gradient, as `largest` does x; and a tensor []
                    that backward writes the gradient's largest magnitude to. None with current scaling
        x_transposed    x8 as [k, rows], which backward keeps in the place of x8; None to keep x8
        weight_grad     dtype of the weights' gradients as the GEMM writes them; None for the weights' own
        w_transposed    w8 as [k, n], which backward multiplies; None for a payload that it makes from the weights anew
        returns     y_i [..., n_i] of each, in `out_dtype`: parts of (x8 @ w8.T) * x_scale_inv * w_scale_inv, plus bias

In backward the linears are one: one GEMM has all gradients of the weights, and one the gradient of x, which needs no
sum. Gradients are quantised to `grad_format`, together: "e4m3", as the pass has it, or "e5m2", with the range of
float16 and one bit less of mantissa. Scaled by its largest number, a tensor has three bits in e4m3 down to 1/28672 of
that number. k, each n_i and the rows of x are multiples of 16, as the tensor cores require.
Saved for backward: x8 or x_transposed, the two scales, and the weights, whose payload is recomputed, or w_transposed; x
itself is not.
Sources: FP8 formats, https://arxiv.org/abs/2209.05433; current and delayed scaling as in Transformer Engine's
Float8CurrentScaling and DelayedScaling, but that by either an infinite number becomes NaN, and that scales come from
what is finite, so that rows beside an infinite one, or one of NaN, are what they would be without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import elements, rows
from megacpp_compile.lowerings._op import bias_gradient, define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.fp8_linear import reference
from megacpp_compile.lowerings.fp8_linear.reference import ALIGNED, DTYPES

PREFERENCE = {"cuda": ("cuda_scaled_mm", "reference")}
REFERENCE_SERVES = {
    "tpu": "no plan asks for float8 there, so no pass makes it; a call is rounding, widening and plain GEMMs",
}


@define_op(reference.fp8_quantize)
def fp8_quantize(x, format):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=DTYPES[format]), x.new_empty((), dtype=torch.float32)


@define_op(reference.fp8_quantize_transposed)
def fp8_quantize_transposed(x, format):  # type: ignore[no-untyped-def]
    columns = x.new_empty((x.shape[-1], x.numel() // x.shape[-1]), dtype=DTYPES[format])
    return x.new_empty(x.shape, dtype=DTYPES[format]), columns, x.new_empty((), dtype=torch.float32)


@define_op(reference.fp8_quantize_delayed)
def fp8_quantize_delayed(x, largest, format, transposed):  # type: ignore[no-untyped-def]
    number, dtype = x.new_empty((), dtype=torch.float32), DTYPES[format]
    columns = x.new_empty((x.shape[-1], x.numel() // x.shape[-1]) if transposed else (0,), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), columns, number, torch.empty_like(number)


@define_op(reference.push_maxima)
def push_maxima(history, latest, grads):  # type: ignore[no-untyped-def]
    return torch.empty_like(history), history.new_empty((history.shape[1], ALIGNED))


@define_op(reference.fp8_linear)
def fp8_linear(  # type: ignore[no-untyped-def]
    x, weights, x8, x_scale_inv, w8, w_scale_inv, biases, grad_format, out_dtype,
    grad_largest=None, grad_seen=None, x_transposed=None, weight_grad=None, w_transposed=None
):  # fmt: skip
    return [x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype) for w in weights]


@define_op(reference.fp8_linear_backward)
def fp8_linear_backward(  # type: ignore[no-untyped-def]
    grads, x8, x_scale_inv, weights, w_scale_inv, grad_format, x_dtype,
    largest=None, transposed=False, weight_grad=None, w_transposed=None
):  # fmt: skip
    """Gradients of x and of the weights, one below the other [n, k], and the largest magnitude of `grads` [].
    transposed: x8 is [k, rows]. w_transposed: the weights' payload [k, n], None where it is to be made."""
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    dx = grads[0].new_empty((*grads[0].shape[:-1], k), dtype=x_dtype)
    dw = weights[0].new_empty((n, k), dtype=weight_grad or weights[0].dtype)
    return dx, dw, x8.new_empty((), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, x8, x_scale_inv, _, w_scale_inv, biases, ctx.grad_format, _, *delayed = inputs
    grad_largest, ctx.grad_seen, x_transposed, ctx.weight_grad, w_transposed = delayed
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.bias_dtypes = x.dtype, [b.dtype for b in biases]
    # Not saved: backward writes to `grad_seen`, and reads nothing of it.
    ctx.transposed = x_transposed is not None
    ctx.save_for_backward(x_transposed if ctx.transposed else x8, x_scale_inv, w_scale_inv, grad_largest, w_transposed,
                          *weights)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x8, x_scale_inv, w_scale_inv, largest, w_transposed, *weights = ctx.saved_tensors
    # A linear that no loss depends on has no gradient, as in eager.
    used = {i: g for i, g in enumerate(grads) if g is not None}
    own = [weights[i] for i in used]
    if w_transposed is not None and len(own) < len(weights):
        columns = w_transposed.split([w.shape[0] for w in weights], 1)
        w_transposed = torch.cat([columns[i] for i in used], 1)
    # What a call does not have it does not name, so that lowerings see the arguments that they know.
    cast = () if w_transposed is None else (w_transposed,)
    dx, dw, seen = fp8_linear_backward(
        list(used.values()), x8, x_scale_inv, own, w_scale_inv, ctx.grad_format, ctx.x_dtype, largest, ctx.transposed,
        ctx.weight_grad, *cast,
    )  # fmt: skip
    if ctx.grad_seen is not None:
        ctx.grad_seen.copy_(seen)
    rows_of = dict(zip(used, dw.split([w.shape[0] for w in own]) if len(own) > 1 else [dw], strict=True))
    dbs = [None if (g := used.get(i)) is None else bias_gradient(g, d) for i, d in enumerate(ctx.bias_dtypes)]
    dws = [rows_of.get(i) for i in range(len(weights))]
    # One for every argument the caller gave, defaults not counted.
    return (dx, dws, None, None, None, None, dbs, *[None] * 7)[: len(ctx.needs_input_grad)]


fp8_linear.register_autograd(_backward, setup_context=_setup_context)


def _flops(x: Tensor, weights: list[Tensor], *_: Any) -> float:
    """Half of what 16-bit linears have, as a GEMM in float8 takes half its time."""
    return rows(x) * sum(map(elements, weights))


declare(
    {
        "megacpp::fp8_quantize": OpTraits(),
        "megacpp::fp8_quantize_transposed": OpTraits(),
        "megacpp::fp8_quantize_delayed": OpTraits(),
        "megacpp::push_maxima": OpTraits(recomputable=False),  # of tensors that the step writes to
        "megacpp::fp8_linear": OpTraits(gemm=True, flops=_flops),
        "megacpp::fp8_linear_backward": OpTraits(),
    }
)
