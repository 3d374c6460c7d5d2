"""`megacpp::fp8_linear`: linears that share an input, their GEMMs in float8, each operand with one scale of its own.

    fp8_quantize(x, format)     payload, x's shape in float8, and scale_inv [], float32: x = payload * scale_inv.
                                format "e4m3" or "e5m2"; the scale comes from the values x has now ("current scaling")
    fp8_linear(x, weights, x8, x_scale_inv, w8, w_scale_inv, biases, grad_format, out_dtype)
        x           [..., k]; takes the gradient, and is not read
        weights     one [n_i, k] of each linear; they take the gradients, and are read in backward only
        x8, w8      the payloads in e4m3 of x and of all weights, one below the other [n, k], with their scales
        biases      one [n_i] of each linear, or none
        returns     y_i [..., n_i] of each, in `out_dtype`: parts of (x8 @ w8.T) * x_scale_inv * w_scale_inv, plus bias

In backward the linears are one: one GEMM has all gradients of the weights, and one the gradient of x, which needs no
sum. Gradients are quantised to `grad_format`, together: "e4m3", as the pass has it, or "e5m2", with the range of
float16 and one bit less of mantissa. Scaled by its largest number, a tensor has three bits in e4m3 down to 1/28672 of
that number. k, each n_i and the rows of x are multiples of 16, as the tensor cores require.
Saved for backward: x8, the two scales, and the weights, whose payload is recomputed; x itself is not.
Sources: FP8 formats, https://arxiv.org/abs/2209.05433; current scaling as in Transformer Engine's Float8CurrentScaling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import elements, rows
from megacpp_compile.lowerings._op import bias_gradient, no_autocast
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.fp8_linear import reference
from megacpp_compile.lowerings.fp8_linear.reference import DTYPES

PREFERENCE = {"cuda": ("cuda_scaled_mm", "reference")}
REFERENCE_SERVES = {
    "tpu": "no plan asks for float8 there, so no pass makes it; a call is rounding, widening and plain GEMMs",
}


@torch.library.custom_op("megacpp::fp8_quantize", mutates_args=())
def fp8_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    with no_autocast(x):
        return reference.fp8_quantize(x, format)


@fp8_quantize.register_fake
def _(x, format):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=DTYPES[format]), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megacpp::fp8_linear", mutates_args=())
def fp8_linear(
    x: Tensor,
    weights: list[Tensor],
    x8: Tensor,
    x_scale_inv: Tensor,
    w8: Tensor,
    w_scale_inv: Tensor,
    biases: list[Tensor],
    grad_format: str,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    with no_autocast(x):
        return reference.fp8_linear(x, weights, x8, x_scale_inv, w8, w_scale_inv, biases, grad_format, out_dtype)


@fp8_linear.register_fake
def _(x, weights, x8, x_scale_inv, w8, w_scale_inv, biases, grad_format, out_dtype):  # type: ignore[no-untyped-def]
    return [x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype) for w in weights]


@torch.library.custom_op("megacpp::fp8_linear_backward", mutates_args=())
def fp8_linear_backward(
    grads: list[Tensor],
    x8: Tensor,
    x_scale_inv: Tensor,
    weights: list[Tensor],
    w_scale_inv: Tensor,
    grad_format: str,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weights, one below the other [n, k]."""
    with no_autocast(x8):
        return reference.fp8_linear_backward(grads, x8, x_scale_inv, weights, w_scale_inv, grad_format, x_dtype)


@fp8_linear_backward.register_fake
def _(grads, x8, x_scale_inv, weights, w_scale_inv, grad_format, x_dtype):  # type: ignore[no-untyped-def]
    n = sum(w.shape[0] for w in weights)
    return grads[0].new_empty(x8.shape, dtype=x_dtype), weights[0].new_empty((n, x8.shape[-1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, x8, x_scale_inv, _, w_scale_inv, biases, ctx.grad_format, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.bias_dtypes = x.dtype, [b.dtype for b in biases]
    ctx.save_for_backward(x8, x_scale_inv, w_scale_inv, *weights)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x8, x_scale_inv, w_scale_inv, *weights = ctx.saved_tensors
    # A linear that no loss depends on has no gradient, as in eager.
    used = {i: g for i, g in enumerate(grads) if g is not None}
    own = [weights[i] for i in used]
    dx, dw = fp8_linear_backward(
        list(used.values()), x8, x_scale_inv, own, w_scale_inv, ctx.grad_format, ctx.x_dtype
    )
    rows_of = dict(zip(used, dw.split([w.shape[0] for w in own]) if len(own) > 1 else [dw], strict=True))
    dbs = [None if (g := used.get(i)) is None else bias_gradient(g, d) for i, d in enumerate(ctx.bias_dtypes)]
    return dx, [rows_of.get(i) for i in range(len(weights))], None, None, None, None, dbs, None, None


fp8_linear.register_autograd(_backward, setup_context=_setup_context)


def _flops(x: Tensor, weights: list[Tensor], *_: Any) -> float:
    """Half of what 16-bit linears have, as a GEMM in float8 takes half its time."""
    return rows(x) * sum(map(elements, weights))


declare(
    {
        "megacpp::fp8_quantize": OpTraits(),
        "megacpp::fp8_linear": OpTraits(gemm=True, flops=_flops),
        "megacpp::fp8_linear_backward": OpTraits(),
    }
)
