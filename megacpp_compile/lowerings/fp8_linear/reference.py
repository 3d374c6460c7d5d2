"""`fp8_linear` in plain PyTorch: its meaning, its CPU lowering, and the oracle. Payloads are widened to float32 inside
a GEMM and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8, rounded_by, widened

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    payload, scale = round_to_fp8(x.to(torch.float32), DTYPES[format], whole=True)
    return payload.contiguous(), scale


def _gemm(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    return (widened(a, torch.float32) @ widened(b, torch.float32) * (a_scale_inv * b_scale_inv)).to(dtype)


def fp8_linear(
    x: Tensor,
    weights: list[Tensor],
    x8: Tensor,
    x_scale_inv: Tensor,
    w8: Tensor,
    w_scale_inv: Tensor,
    bias: Tensor | None,
    grad_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    y = _gemm(x8, x_scale_inv, w8.t(), w_scale_inv, torch.float32)
    return (y if bias is None else y + bias).to(out_dtype)


def fp8_linear_backward(
    grad: Tensor,
    x8: Tensor,
    x_scale_inv: Tensor,
    weights: list[Tensor],
    w_scale_inv: Tensor,
    grad_format: str,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    g8, g_scale_inv = fp8_quantize(grad, grad_format)
    w8 = torch.cat([rounded_by(w.to(torch.float32), w_scale_inv, DTYPES["e4m3"]) for w in weights])
    dx = _gemm(g8, g_scale_inv, w8, w_scale_inv, x_dtype)
    dw = _gemm(g8.flatten(0, -2).t(), g_scale_inv, x8.flatten(0, -2), x_scale_inv, weights[0].dtype)
    return dx, dw
