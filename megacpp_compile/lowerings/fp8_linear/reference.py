"""`fp8_linear` in plain PyTorch: its meaning, its CPU lowering, and the oracle. Payloads are widened to float32 inside
a GEMM and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import (
    delayed_scale,
    largest_of,
    round_to_fp8,
    rounded_by,
    rounded_by_past,
    widened,
)

# Numbers of float32 that lie where Triton reads aligned memory, 16 bytes.
ALIGNED = 4
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    payload, scale = round_to_fp8(x.to(torch.float32), DTYPES[format], whole=True)
    return payload.contiguous(), scale


def fp8_quantize_transposed(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    payload, scale = fp8_quantize(x, format)
    return payload, payload.flatten(0, -2).t().contiguous(), scale


def fp8_quantize_delayed(
    x: Tensor, largest: Tensor, format: str, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, dtype = x.to(torch.float32), DTYPES[format]
    scale = delayed_scale(wide, largest[0], dtype)
    payload = rounded_by_past(wide, scale, dtype).contiguous()
    columns = payload.flatten(0, -2).t().contiguous() if transposed else payload.new_empty(0)
    return payload, columns, scale, largest_of(wide)


def push_maxima(history: Tensor, latest: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    newest = torch.cat([latest, torch.stack(grads)]) if grads else latest
    pushed = torch.cat([newest.nan_to_num(0, 0, 0)[None], history[:-1]])
    return pushed, pushed.amax(0)[:, None].expand(-1, ALIGNED).contiguous()


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
    grad_largest: Tensor | None = None,
    grad_seen: Tensor | None = None,
    x_transposed: Tensor | None = None,
    weight_grad: torch.dtype | None = None,
    w_transposed: Tensor | None = None,
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
    largest: Tensor | None = None,
    transposed: bool = False,
    weight_grad: torch.dtype | None = None,
    w_transposed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = torch.cat(grads, -1)
    if largest is None:
        (g8, g_scale_inv), seen = fp8_quantize(grad, grad_format), largest_of(grad.to(torch.float32))
    else:
        g8, _, g_scale_inv, seen = fp8_quantize_delayed(grad, largest, grad_format, False)
    if w_transposed is None:
        w8 = torch.cat([rounded_by(w.to(torch.float32), w_scale_inv, DTYPES["e4m3"]) for w in weights])
    else:
        w8 = w_transposed.t()
    dx = _gemm(g8, g_scale_inv, w8, w_scale_inv, x_dtype)
    rows = x8.t() if transposed else x8.flatten(0, -2)
    dw = _gemm(g8.flatten(0, -2).t(), g_scale_inv, rows, x_scale_inv, weight_grad or weights[0].dtype)
    return dx, dw, seen
