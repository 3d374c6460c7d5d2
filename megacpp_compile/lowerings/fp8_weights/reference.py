"""`fp8_weights` in plain PyTorch: its meaning, its CPU lowering, and the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels import grouped
from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.fp8_linear.reference import DTYPES, fp8_quantize


def fp8_quantize_weights(weights: list[Tensor], transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    payload, scale = fp8_quantize(torch.cat(weights), "e4m3")
    return payload, payload.t().contiguous() if transposed else payload.new_empty(0), scale


def fp8_quantize_experts(weights: list[Tensor], parts: int, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    each = grouped.separate(weights)
    stack = torch.stack([w.to(compute_dtype(w)) for w in each])
    payload, scale = round_to_fp8(stack, DTYPES["e4m3"])

    def by_expert(t: Tensor) -> Tensor:
        """[parts * E, r, ...] as [E, parts * r, ...]."""
        return t.unflatten(0, (parts, -1)).transpose(0, 1).flatten(1, 2).contiguous()

    rows = by_expert(payload)
    columns = rows.transpose(1, 2).contiguous() if transposed else rows.new_empty(0)
    return rows, columns, by_expert(scale.squeeze(-1))
