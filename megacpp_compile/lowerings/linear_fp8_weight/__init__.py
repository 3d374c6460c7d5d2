"""`megacpp::linear_fp8_weight`: a linear whose weight is fp8 already, and stays so in memory.

    x        [..., k]   float32, float16, bfloat16 (float64)
    payload  [n, k]     float8_e4m3fn;  weight = payload * scale
    scale    float32: [1, 1] for all, [n, 1] for rows, or [ceil(n/128), ceil(k/128)] for blocks of 128 x 128
    bias     [n] or None
    returns  [..., n] in `out_dtype`

x is rounded to e4m3 by current scaling, at the weight's granularity: by its largest magnitude where the weight has one
scale, by each row's for scales by row, by that of every 128 channels of a row for scales by block. GEMMs are summed in
float32 (float64 for float64) and rounded once. Backward gives x's gradient: the output's gradient, times the scales of
the weight's rows, is rounded to e4m3 by its largest magnitude and multiplied with the payload. The weight is frozen
and has no gradient. One scale for all of x, or of a gradient, comes from what is finite of it; the rest becomes NaN.
Raises OperandError for other shapes and dtypes. Saved for backward: payload and scale.
Sources: FP8 formats, https://arxiv.org/abs/2209.05433 (with gradients in e5m2; under current scaling e4m3 is more
precise); blocks, and gradients in e4m3, https://arxiv.org/abs/2412.19437, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import elements, rows
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.lowerings._op import define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.linear_fp8_weight import reference

REFERENCE_SERVES = {"tpu": "a payload that stays float8 in memory, rounding, widening and a plain GEMM"}


def _check(x: Tensor, payload: Tensor, scale: Tensor) -> str | None:
    if payload.dim() != 2 or x.shape[-1] != payload.shape[1]:
        return f"x is {tuple(x.shape)}, payload {tuple(payload.shape)}, not [..., k] and [n, k]"
    if payload.dtype != torch.float8_e4m3fn:
        return f"payload is {payload.dtype}, not torch.float8_e4m3fn"
    n, k = payload.shape
    shapes = (1, 1), (n, 1), (-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
    if tuple(scale.shape) not in shapes:
        return f"scale is {tuple(scale.shape)}: for a weight {(n, k)} it is one of {', '.join(map(str, shapes))}"
    return None


@define_op(reference.linear_fp8_weight, check=_check, served=True)
def linear_fp8_weight(x, payload, scale, bias, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], payload.shape[0]), dtype=out_dtype)


@define_op(reference.linear_fp8_weight_backward, served=True)
def linear_fp8_weight_backward(grad, payload, scale, out_dtype):  # type: ignore[no-untyped-def]
    return grad.new_empty((*grad.shape[:-1], payload.shape[1]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, payload, scale, bias, _ = inputs
    ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(payload, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs_x, *_, needs_bias, _ = ctx.needs_input_grad
    d_x = linear_fp8_weight_backward(grad, *ctx.saved_tensors, ctx.dtype) if needs_x else None
    wide = torch.promote_types(grad.dtype, torch.float32)
    d_bias = grad.flatten(0, -2).sum(0, dtype=wide).to(ctx.bias_dtype) if needs_bias and grad.dim() > 1 else None
    if needs_bias and grad.dim() == 1:
        d_bias = grad.to(ctx.bias_dtype, copy=True)
    return d_x, None, None, d_bias, None


linear_fp8_weight.register_autograd(_backward, setup_context=_setup_context)



def _flops(x: Tensor, payload: Tensor, *_: Any) -> float:
    return rows(x) * elements(payload)  # 2 m n k of FLOPs, at twice the rate


declare(
    {
        "megacpp::linear_fp8_weight": OpTraits(gemm=True, flops=_flops),
        "megacpp::linear_fp8_weight_backward": OpTraits(),
    }
)
