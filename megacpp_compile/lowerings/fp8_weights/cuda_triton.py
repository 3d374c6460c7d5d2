"""`fp8_weights` on CUDA: a weight's largest magnitude in one pass over it, and both payloads in another; the rows of
experts' weights, which each program holds whole, in one pass, and what is transposed in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT, no_float8
from megacpp_compile.lowerings._kernels import grouped_fp8  # noqa: F401  registers the casts of experts
from megacpp_compile.lowerings._kernels.fp8 import ROOM
from megacpp_compile.lowerings.fp8_linear.cuda_scaled_mm import cast

__all__ = ["fp8_quantize_experts", "fp8_quantize_weights", "supports"]


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    weights = args[0]
    if missing := no_float8(weights[0].device):
        return missing
    if weights[0].dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"weights in {weights[0].dtype}"
    if any(isinstance(n, int) and n % FP8_GEMM_ALIGNMENT for w in weights for n in w.shape[-2:]):
        return f"weights of {tuple(weights[0].shape)}, which are no multiples of {FP8_GEMM_ALIGNMENT}"
    return None


def fp8_quantize_weights(weights: list[Tensor], transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    w = weights[0] if len(weights) == 1 else torch.cat(weights)
    # One pass, and no copy of magnitudes, where this runs outside of a graph.
    largest = torch.linalg.vector_norm(w, float("inf"), dtype=torch.float32)
    return cast(w, largest.view(1) / ROOM, transposed, True)[:3]


def fp8_quantize_experts(weights: list[Tensor], parts: int, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    payload, scale = torch.ops.grouped_gemms.weights_fp8(weights, parts)
    none = payload.new_empty(0)
    return payload, torch.ops.grouped_gemms.transposed_fp8(weights, scale) if transposed else none, scale
