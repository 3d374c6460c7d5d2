"""`linear_fp8_weight` on CUDA: the GEMM is cuBLASLt's (`torch._scaled_mm`), on the payload as it lies; rounding x is
plain code, of which Inductor makes one Triton kernel with what comes before.

With a scale per block the forward's GEMM is cuBLASLt's too, where it has such GEMMs. The reference serves the backward,
and the forward elsewhere: it widens the weight inside the op, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._gemm.block_scaled import by_squares
from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT, no_block_scales, no_float8
from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK, fp8_gemm, round_to_fp8
from megacpp_compile.lowerings._kernels.fp8_tiles import round_by_tiles
from megacpp_compile.lowerings.linear_fp8_weight.reference import by_blocks

__all__ = ["linear_fp8_weight", "linear_fp8_weight_backward", "supports"]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why fp8 GEMMs cannot serve this call, or None."""
    x, payload, scale, out_dtype = args[0], args[1], args[2], args[-1]
    if by_blocks(payload, scale):
        return _no_blocks(name, x, payload, out_dtype)
    if any(not isinstance(n, int) or n % FP8_GEMM_ALIGNMENT for n in payload.shape):
        return f"a weight {tuple(payload.shape)}: fp8 GEMMs take multiples of {FP8_GEMM_ALIGNMENT}"
    if x.dtype == torch.float64 or out_dtype == torch.float64:
        return "float64: fp8 GEMMs are summed in float32"
    if name == "linear_fp8_weight" and scale.numel() > 1 and out_dtype != torch.bfloat16:
        return f"a scale for every row, and results in {out_dtype}: those are bfloat16"
    if any(isinstance(n, int) and n == 0 for n in (*x.shape, *payload.shape)):
        return "there is nothing to multiply"
    return (no_float8(x.device) if x.device.type == "cuda" else "") or None  # a CPU has the GEMM, in software


def _no_blocks(name: str, x: Tensor, payload: Tensor, out_dtype: torch.dtype) -> str | None:
    if name != "linear_fp8_weight":
        return "backward with a scale for every block of 128 x 128"
    if missing := no_block_scales(x.device):
        return f"a scale for every block of 128 x 128: {missing}"
    rows = x[..., 0].numel()
    if any(not isinstance(n, int) or n % SCALE_BLOCK for n in payload.shape) or not isinstance(rows, int):
        return f"a weight {tuple(payload.shape)} for {rows} rows: block scales take multiples of {SCALE_BLOCK}"
    if not rows or rows % FP8_GEMM_ALIGNMENT:
        return f"{rows} rows: block scales take multiples of {FP8_GEMM_ALIGNMENT}"
    odd = out_dtype not in (torch.bfloat16, torch.float32) or x.dtype == torch.float64
    return f"x in {x.dtype}, results in {out_dtype}: those are bfloat16 or float32" if odd else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(torch.float32)


def linear_fp8_weight(
    x: Tensor, payload: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if by_blocks(payload, scale):
        rounded, own = round_by_tiles(_rows(x), 1, SCALE_BLOCK)
        y = by_squares(rounded, own.t().contiguous(), payload.contiguous(), scale, out_dtype)
        return (y if bias is None else (y + bias).to(out_dtype)).view(*x.shape[:-1], payload.shape[0])
    whole = scale.numel() == 1
    rounded, own = round_to_fp8(_rows(x), torch.float8_e4m3fn, whole=whole)
    weight_scale = scale.reshape(()) if whole else scale.t().contiguous()
    y = fp8_gemm(rounded, own, payload.contiguous(), weight_scale.float(), out_dtype, bias)
    return y.view(*x.shape[:-1], payload.shape[0])


def linear_fp8_weight_backward(grad: Tensor, payload: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    rounded, own = round_to_fp8(_rows(grad) * scale.t(), torch.float8_e4m3fn, whole=True)
    # The second operand has to lie column by column: a transposed copy, of one byte an element.
    columns = payload.t().contiguous()
    d_x = fp8_gemm(rounded, own, columns, torch.ones_like(own), out_dtype)
    return d_x.view(*grad.shape[:-1], payload.shape[1])
