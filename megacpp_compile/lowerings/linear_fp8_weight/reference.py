"""`linear_fp8_weight` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

The payload is widened here, inside the op, and exactly: nothing outside sees a weight of full width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import SCALE_BLOCK, round_to_fp8, widened
from megacpp_compile.lowerings._kernels.fp8_tiles import round_by_tiles, widened_by_tiles
from megacpp_compile.lowerings._op import compute_dtype


def _weight(payload: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if by_blocks(payload, scale):
        return widened_by_tiles(payload, scale, SCALE_BLOCK, SCALE_BLOCK, dtype)
    return widened(payload, dtype) * scale.to(dtype)


def by_blocks(payload: Tensor, scale: Tensor) -> bool:
    """Whether a weight has a scale per block; a single block counts as one scale for all."""
    return scale.shape[1] > 1 or scale.shape[0] not in (1, payload.shape[0])


def _rounded(x: Tensor, payload: Tensor, scale: Tensor) -> Tensor:
    """x rounded to e4m3 and widened again, in x's dtype."""
    if not by_blocks(payload, scale):
        rounded, own = round_to_fp8(x, torch.float8_e4m3fn, whole=scale.numel() == 1)
        return widened(rounded, x.dtype) * own
    tiles = 1, SCALE_BLOCK
    return widened_by_tiles(*round_by_tiles(x.unsqueeze(-2), *tiles), *tiles, x.dtype).squeeze(-2)


def linear_fp8_weight(
    x: Tensor, payload: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    dtype = compute_dtype(x.dtype)
    y = _rounded(x.to(dtype), payload, scale) @ _weight(payload, scale, dtype).t()
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(out_dtype)


def linear_fp8_weight_backward(grad: Tensor, payload: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    dtype = compute_dtype(grad.dtype)
    grad = grad.to(dtype)
    if by_blocks(payload, scale):
        rows, weight = grad, _weight(payload, scale, dtype)
    else:
        rows, weight = grad * scale.to(dtype).squeeze(1), widened(payload, dtype)
    rounded, own = round_to_fp8(rows, torch.float8_e4m3fn, whole=True)
    return ((widened(rounded, dtype) * own) @ weight).to(out_dtype)
