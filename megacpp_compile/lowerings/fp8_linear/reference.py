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
    biases: list[Tensor],
    grad_format: str,
    out_dtype: torch.dtype,
) -> list[Tensor]:
    each = w8.split([w.shape[0] for w in weights])
    ys = [_gemm(x8, x_scale_inv, own.t(), w_scale_inv, torch.float32) for own in each]
    ys = [y + b for y, b in zip(ys, biases, strict=True)] if biases else ys
    return [y.to(out_dtype) for y in ys]


def fp8_linear_backward(
    grads: list[Tensor],
    x8: Tensor,
    x_scale_inv: Tensor,
    weights: list[Tensor],
    w_scale_inv: Tensor,
    grad_format: str,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    g8, g_scale_inv = fp8_quantize(torch.cat(grads, -1), grad_format)
    w8 = torch.cat([rounded_by(w.to(torch.float32), w_scale_inv, DTYPES["e4m3"]) for w in weights])
    dx = _gemm(g8, g_scale_inv, w8, w_scale_inv, x_dtype)
    dw = _gemm(g8.flatten(0, -2).t(), g_scale_inv, x8.flatten(0, -2), x_scale_inv, weights[0].dtype)
    return dx, dw
