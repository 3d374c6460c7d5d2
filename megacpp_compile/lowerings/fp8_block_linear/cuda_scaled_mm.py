"""`fp8_block_linear` on CUDA: cuBLASLt's GEMMs of payloads with block scales (`_gemm/block_scaled.py`), with the
rounding in ATen, which Inductor fuses into what stands before: a tile's largest number and its cast in one pass.

Hopper's float8 GEMM wants both operands with the summed dimension contiguous: in backward the weight and, for its
gradient, x and the output's gradient are written as transposed payloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._gemm.block_scaled import by_squares
from megacpp_compile.lowerings._gemm.float8_support import no_block_scales, no_linear
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.lowerings._kernels.fp8_tiles import round_by_tiles, rounded_by_tiles, widened_by_tiles
from megacpp_compile.lowerings.fp8_block_linear.reference import fp8_quantize_tiles

__all__ = ["fp8_block_linear", "fp8_block_linear_backward", "fp8_quantize_tiles", "supports"]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    if missing := no_block_scales(args[0].device):
        return missing
    if name == "fp8_quantize_tiles":
        return None
    backward = name == "fp8_block_linear_backward"
    x8, weight = (args[1], args[3]) if backward else (args[2], args[1])
    if any(isinstance(n, int) and n == 0 for n in (*x8.shape, *weight.shape)):
        return "there is nothing to multiply"
    return no_linear(args, backward, SCALE_BLOCK)


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    weight_grad: torch.dtype | None = None,
) -> Tensor:
    y = by_squares(x8.flatten(0, -2), x_scale.flatten(0, -2).t().contiguous(), w8, w_scale, out_dtype)
    y = y if bias is None else (y + bias).to(out_dtype)
    return y.unflatten(0, x8.shape[:-1])


def fp8_block_linear_backward(
    grad: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    x_dtype: torch.dtype,
    weight_grad: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    grad = grad.flatten(0, -2).to(torch.float32)
    rows, rows_scale = round_by_tiles(grad, 1, SCALE_BLOCK)
    columns_of_w = w_scale.t().contiguous()
    wide = weight.t().to(torch.float32)
    w = rounded_by_tiles(wide, columns_of_w, SCALE_BLOCK, SCALE_BLOCK, torch.float8_e4m3fn).contiguous()
    dx = by_squares(rows.contiguous(), rows_scale.t().contiguous(), w, columns_of_w, x_dtype)
    x = widened_by_tiles(x8, x_scale, 1, SCALE_BLOCK, torch.float32).flatten(0, -2)
    dw = torch.ops.megacpp.block_scaled_mm(*_columns(grad), *_columns(x), weight_grad or weight.dtype)
    return dx.unflatten(0, x8.shape[:-1]), dw


def _columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x.T as a payload [k, m], its scales [m / 128, k]) of x [m, k]."""
    payload, scale = round_by_tiles(x, SCALE_BLOCK, 1)
    return payload.t().contiguous(), scale
