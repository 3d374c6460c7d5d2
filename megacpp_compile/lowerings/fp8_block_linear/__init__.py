"""`megacpp::fp8_block_linear`: a linear whose three GEMMs are in e4m3, with a scale for every block of 128.

    fp8_quantize_tiles(x, rows)     payload, x's shape [..., r, k] in e4m3, and scales [..., ceil(r / rows),
                                    ceil(k / 128)], float32: the largest of rows x 128 numbers becomes e4m3's largest
    fp8_block_linear(x, weight, x8, x_scale, w8, w_scale, bias, out_dtype, weight_grad)
        x           [..., k], of two dimensions or more; takes the gradient, and is not read
        weight      [n, k]; takes the gradient, and is read in backward only
        x8          x's payload, x_scale [..., k / 128]: 1 x 128
        w8          the weight's, w_scale [n / 128, k / 128]: 128 x 128
        bias        [n] or None
        weight_grad     dtype of the weight's gradient as the GEMM writes it; None for the weight's own
        returns     y [..., n] in `out_dtype`

Gradients are rounded to e4m3, too: 1 x 128 along n for x's gradient, 128 x 1 along tokens for the weight's, for which
x's payload is rounded a second time, along tokens. GEMMs are summed in float32.
Saved for backward: x8, its scales (four bytes for 128 channels), weight and its scales; x itself is not.
Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3; scales are any float32 number, as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import elements, rows
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.lowerings._op import bias_gradient, define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.fp8_block_linear import reference

PREFERENCE = {"cuda": ("cuda_scaled_mm", "reference")}
REFERENCE_SERVES = {
    "tpu": "no plan asks for float8 there, so no pass makes it; a call is rounding, widening and plain GEMMs",
}


@define_op(reference.fp8_quantize_tiles)
def fp8_quantize_tiles(x, rows):  # type: ignore[no-untyped-def]
    r, k = x.shape[-2:]
    scales = (*x.shape[:-2], -(-r // rows), -(-k // SCALE_BLOCK))
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


@define_op(reference.fp8_block_linear)
def fp8_block_linear(x, weight, x8, x_scale, w8, w_scale, bias, out_dtype, weight_grad=None):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


@define_op(reference.fp8_block_linear_backward)
def fp8_block_linear_backward(grad, x8, x_scale, weight, w_scale, x_dtype, weight_grad=None):  # type: ignore[no-untyped-def]
    """Gradients of x and weight."""
    return grad.new_empty(x8.shape, dtype=x_dtype), weight.new_empty(weight.shape, dtype=weight_grad or weight.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, x8, x_scale, _, w_scale, bias, _, ctx.weight_grad = inputs
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(x8, x_scale, weight, w_scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dx, dw = fp8_block_linear_backward(grad, *ctx.saved_tensors, ctx.x_dtype, ctx.weight_grad)
    db = None if ctx.bias_dtype is None else bias_gradient(grad, ctx.bias_dtype)
    # One for every argument the caller gave, defaults not counted.
    return (dx, dw, None, None, None, None, db, None, None)[: len(ctx.needs_input_grad)]


fp8_block_linear.register_autograd(_backward, setup_context=_setup_context)


def _flops(x: Tensor, weight: Tensor, *_: Any) -> float:
    """Half of what a 16-bit linear has, as a GEMM in float8 takes half its time."""
    return rows(x) * elements(weight)


declare(
    {
        "megacpp::fp8_quantize_tiles": OpTraits(),
        "megacpp::fp8_block_linear": OpTraits(gemm=True, flops=_flops),
        "megacpp::fp8_block_linear_backward": OpTraits(),
    }
)
