"""`fp8_block_linear` in plain PyTorch: its meaning, its CPU lowering, and the oracle. Payloads are widened to float32
inside a GEMM and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK
from megacpp_compile.lowerings._kernels.fp8_tiles import round_by_tiles, rounded_by_tiles, widened_by_tiles


def fp8_quantize_tiles(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    payload, scale = round_by_tiles(x.to(torch.float32), rows, SCALE_BLOCK)
    return payload.contiguous(), scale


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
    wide = widened_by_tiles(x8, x_scale, 1, SCALE_BLOCK, torch.float32)
    y = wide @ widened_by_tiles(w8, w_scale, SCALE_BLOCK, SCALE_BLOCK, torch.float32).t()
    return (y if bias is None else y + bias).to(out_dtype)


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
    w8 = rounded_by_tiles(weight.to(torch.float32), w_scale, SCALE_BLOCK, SCALE_BLOCK, torch.float8_e4m3fn)
    dx = _as_rounded(grad, 1, SCALE_BLOCK) @ widened_by_tiles(w8, w_scale, SCALE_BLOCK, SCALE_BLOCK, torch.float32)
    x = widened_by_tiles(x8, x_scale, 1, SCALE_BLOCK, torch.float32).flatten(0, -2)
    dw = _as_rounded(grad, SCALE_BLOCK, 1).t() @ _as_rounded(x, SCALE_BLOCK, 1)
    return dx.view(x8.shape).to(x_dtype), dw.to(weight_grad or weight.dtype)


def _as_rounded(x: Tensor, rows: int, columns: int) -> Tensor:
    return widened_by_tiles(*round_by_tiles(x, rows, columns), rows, columns, torch.float32)
