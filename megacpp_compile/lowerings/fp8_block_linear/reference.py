"""`fp8_block_linear` in plain PyTorch: its meaning, its CPU lowering, and the oracle. Payloads are widened to float32
inside a product and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import SCALED_LANES as LANES
from megacpp_compile.lowerings._kernels.fp8_tiles import round_by_tiles, rounded_by_tiles, widened_by_tiles


def fp8_quantize_tiles(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    payload, scale = round_by_tiles(x.to(torch.float32), rows, LANES)
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
) -> Tensor:
    wide = widened_by_tiles(x8, x_scale, 1, LANES, torch.float32)
    y = wide @ widened_by_tiles(w8, w_scale, LANES, LANES, torch.float32).t()
    return (y if bias is None else y + bias).to(out_dtype)


def fp8_block_linear_backward(
    grad: Tensor, x8: Tensor, x_scale: Tensor, weight: Tensor, w_scale: Tensor, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    grad = grad.flatten(0, -2).to(torch.float32)
    w8 = rounded_by_tiles(weight.to(torch.float32), w_scale, LANES, LANES, torch.float8_e4m3fn)
    dx = _as_rounded(grad, 1, LANES) @ widened_by_tiles(w8, w_scale, LANES, LANES, torch.float32)
    x = widened_by_tiles(x8, x_scale, 1, LANES, torch.float32).flatten(0, -2)
    dw = _as_rounded(grad, LANES, 1).t() @ _as_rounded(x, LANES, 1)
    return dx.view(x8.shape).to(x_dtype), dw.to(weight.dtype)


def _as_rounded(x: Tensor, rows: int, lanes: int) -> Tensor:
    return widened_by_tiles(*round_by_tiles(x, rows, lanes), rows, lanes, torch.float32)
