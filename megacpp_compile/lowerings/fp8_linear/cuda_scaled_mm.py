"""`fp8_linear` on CUDA: cuBLASLt's GEMMs of float8 (`torch._scaled_mm`), with the casts around them in ATen, which
Inductor fuses into the norm, activation or rotation before them.

Hopper's float8 GEMM wants both operands with the summed dimension contiguous. The gradient of the weights therefore
casts both into transposed copies, that of the input the weights. Forward GEMMs accumulate fast (in the tensor cores'
own 22 bits), backward ones exactly, as Transformer Engine has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._gemm.float8_support import MULTIPLE, no_float8, no_linear
from megacpp_compile.lowerings._kernels.fp8 import fp8_gemm, rounded_by, scale_of
from megacpp_compile.lowerings.fp8_linear.reference import DTYPES, fp8_quantize

__all__ = ["fp8_linear", "fp8_linear_backward", "fp8_quantize", "supports"]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    backward = name == "fp8_linear_backward"
    if missing := no_float8(args[1 if backward else 0].device):
        return missing
    if name == "fp8_quantize":
        return None
    return no_linear(args, backward, MULTIPLE)


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
    # A GEMM each: parts of one result would keep all of it alive for as long as any of them.
    payloads = [w8] if len(weights) == 1 else w8.split([w.shape[0] for w in weights])
    flat = x8.flatten(0, -2)
    return [
        fp8_gemm(flat, x_scale_inv, own, w_scale_inv, out_dtype, b, fast=True).unflatten(0, x8.shape[:-1])
        for own, b in itertools.zip_longest(payloads, biases)
    ]


def fp8_linear_backward(
    grads: list[Tensor],
    x8: Tensor,
    x_scale_inv: Tensor,
    weights: list[Tensor],
    w_scale_inv: Tensor,
    grad_format: str,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    format = DTYPES[grad_format]
    grad = _joined(grads, -1).flatten(0, -2).to(torch.float32)
    scale_inv = scale_of(grad, format, whole=True)
    rows = rounded_by(grad, scale_inv, format).contiguous()
    columns = rounded_by(grad.t(), scale_inv, format).contiguous()
    turned = [rounded_by(w.t().to(torch.float32), w_scale_inv, DTYPES["e4m3"]) for w in weights]
    w_columns = _joined(turned, 1).contiguous()
    dx = fp8_gemm(rows, scale_inv, w_columns, w_scale_inv, x_dtype).unflatten(0, x8.shape[:-1])
    x_columns = x8.flatten(0, -2).t().contiguous()
    dw = fp8_gemm(columns, scale_inv, x_columns, x_scale_inv, weights[0].dtype)
    return dx, dw


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
