"""`megacpp::fp8_linear`: a linear whose three GEMMs are in float8, each operand with one scale of its own.

    fp8_quantize(x, format)     payload, x's shape in float8, and scale_inv [], float32: x = payload * scale_inv.
                                format "e4m3" or "e5m2"; the scale comes from the values x has now ("current scaling")
    fp8_linear(x, weights, x8, x_scale_inv, w8, w_scale_inv, bias, grad_format, out_dtype)
        x           [..., k]; takes the gradient, and is not read
        weights     tensors [n_i, k], one below the other [n, k]: of linears that share x, in one GEMM; they take the
                    gradients, and are read in backward only
        x8, w8      the payloads in e4m3 of x and of all weights [n, k], with their scales
        bias        [n] or None
        returns     y [..., n] in `out_dtype` = (x8 @ w8.T) * x_scale_inv * w_scale_inv + bias

Gradients are quantised to `grad_format`: "e4m3", as the pass has it, or "e5m2", with the range of float16 and one bit
less of mantissa. Scaled by its largest number, a tensor has three bits in e4m3 down to 1/28672 of that number.
k, n and the rows of x are multiples of 16, as the tensor cores require.
Saved for backward: x8, the two scales, and the weights, whose payload is recomputed; x itself is not.
Sources: FP8 formats, https://arxiv.org/abs/2209.05433; current scaling as in Transformer Engine's Float8CurrentScaling.
"""

from __future__ import annotations

from typing import Any, Optional

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
    bias: Optional[Tensor],  # noqa: UP045  custom_op reads typing.Optional on every supported torch
    grad_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    with no_autocast(x):
        return reference.fp8_linear(x, weights, x8, x_scale_inv, w8, w_scale_inv, bias, grad_format, out_dtype)


@fp8_linear.register_fake
def _(x, weights, x8, x_scale_inv, w8, w_scale_inv, bias, grad_format, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], w8.shape[0]), dtype=out_dtype)


@torch.library.custom_op("megacpp::fp8_linear_backward", mutates_args=())
def fp8_linear_backward(
    grad: Tensor,
    x8: Tensor,
    x_scale_inv: Tensor,
    weights: list[Tensor],
    w_scale_inv: Tensor,
    grad_format: str,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of all weights [n, k]."""
    with no_autocast(grad):
        return reference.fp8_linear_backward(grad, x8, x_scale_inv, weights, w_scale_inv, grad_format, x_dtype)


@fp8_linear_backward.register_fake
def _(grad, x8, x_scale_inv, weights, w_scale_inv, grad_format, x_dtype):  # type: ignore[no-untyped-def]
    return grad.new_empty(x8.shape, dtype=x_dtype), weights[0].new_empty((grad.shape[-1], x8.shape[-1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, x8, x_scale_inv, _, w_scale_inv, bias, ctx.grad_format, _ = inputs
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(x8, x_scale_inv, w_scale_inv, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x8, x_scale_inv, w_scale_inv, *weights = ctx.saved_tensors
    dx, dw = fp8_linear_backward(grad, x8, x_scale_inv, weights, w_scale_inv, ctx.grad_format, ctx.x_dtype)
    db = None if ctx.bias_dtype is None else bias_gradient(grad, ctx.bias_dtype)
    # Gradients of several weights are rows of one tensor.
    dws = [dw] if len(weights) == 1 else list(dw.split([w.shape[0] for w in weights]))
    return dx, dws, None, None, None, None, db, None, None


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
