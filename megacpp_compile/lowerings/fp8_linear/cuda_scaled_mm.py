"""`fp8_linear` on CUDA: cuBLASLt's GEMMs of float8 (`torch._scaled_mm`), and the casts around them.

Hopper's float8 GEMM wants both operands with the summed dimension contiguous: the gradient of the weights reads x and
the gradient transposed, that of the input the weights. A kernel of its own writes both orientations at once
(`_kernels/triton_delayed_cast.py`); by current scaling it gets the largest magnitude that the values have now, from a
reduction in ATen. What has one orientation is cast in ATen, which Inductor fuses into what comes before. Forward GEMMs
accumulate fast (in the tensor cores' own 22 bits), backward ones exactly, as Transformer Engine has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._gemm.float8_support import FP8_GEMM_ALIGNMENT, no_float8, no_linear
from megacpp_compile.lowerings._kernels.fp8 import (
    ROOM,
    delayed_scale,
    fp8_gemm,
    largest_finite,
    largest_of,
    rounded_by,
    rounded_by_past,
    scale_of,
)
from megacpp_compile.lowerings.fp8_linear import reference
from megacpp_compile.lowerings.fp8_linear.reference import DTYPES, fp8_quantize, push_maxima

__all__ = ["SKIPPABLE_OUTPUTS", "cast", "fp8_linear", "fp8_linear_backward", "fp8_quantize", "fp8_quantize_delayed",
           "fp8_quantize_transposed", "push_maxima", "supports"]  # fmt: skip


# A policy's recomputed cast needs one orientation of the payload, and so does the forward behind it.
SKIPPABLE_OUTPUTS = {"fp8_quantize_delayed": (0, 1), "fp8_quantize_transposed": (0, 1)}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    backward = name == "fp8_linear_backward"
    if missing := no_float8(args[1 if backward else 0].device):
        return missing
    if not name.startswith("fp8_linear"):
        return None
    return no_linear(args, backward, FP8_GEMM_ALIGNMENT)


def fp8_quantize_delayed(
    x: Tensor, largest: Tensor, format: str, transposed: bool, unread: frozenset[int] = frozenset()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if format != "e4m3":
        return reference.fp8_quantize_delayed(x, largest, format, transposed)
    return cast(x, largest, transposed and 1 not in unread, 0 not in unread)


def fp8_quantize_transposed(
    x: Tensor, format: str, unread: frozenset[int] = frozenset()
) -> tuple[Tensor, Tensor, Tensor]:
    if format != "e4m3":
        return reference.fp8_quantize_transposed(x, format)
    return cast(x, _past_of(x), 1 not in unread, 0 not in unread)[:3]


def _past_of(x: Tensor) -> Tensor:
    """A past [1] by which delayed scaling has the scale of the values that x has now."""
    return largest_finite(x).to(torch.float32).view(1) / ROOM


def cast(x: Tensor, largest: Tensor, transposed: bool, straight: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(payload in e4m3, the same as [k, rows], scale, largest magnitude); empty what is not asked for."""
    numbers = x.numel()
    # No program would write the scale of none; and it is four rows that are transposed at once.
    if isinstance(numbers, int) and (not numbers or transposed and numbers // x.shape[-1] % 4):
        return reference.fp8_quantize_delayed(x, largest, "e4m3", transposed)
    from megacpp_compile.lowerings._kernels.triton_delayed_cast import delayed_cast

    flat = x.flatten(0, -2)
    payload, columns, scale, seen = delayed_cast(flat, largest, transposed, straight)
    none = flat.new_empty(0, dtype=DTYPES["e4m3"])
    return none if payload is None else payload.view(x.shape), none if columns is None else columns, scale, seen


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
    # A GEMM each: parts of one result would keep all of it alive for as long as any of them.
    payloads = [w8] if len(weights) == 1 else w8.split([w.shape[0] for w in weights])
    flat = x8.flatten(0, -2)
    return [
        fp8_gemm(flat, x_scale_inv, own, w_scale_inv, out_dtype, b, fast=True).unflatten(0, x8.shape[:-1])
        for own, b in itertools.zip_longest(payloads, biases)
    ]


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
    grad = _joined(grads, -1)
    rows, columns, scale_inv, seen = _gradient(grad.flatten(0, -2), grad_format, largest)
    if w_transposed is None:
        each = [rounded_by(w.t().to(torch.float32), w_scale_inv, DTYPES["e4m3"]) for w in weights]
        w_transposed = _joined(each, 1).contiguous()
    dx = fp8_gemm(rows, scale_inv, w_transposed, w_scale_inv, x_dtype).unflatten(0, grad.shape[:-1])
    x_columns = x8 if transposed else x8.flatten(0, -2).t().contiguous()
    dw = fp8_gemm(columns, scale_inv, x_columns, x_scale_inv, weight_grad or weights[0].dtype)
    return dx, dw, seen


def _gradient(grad: Tensor, format: str, largest: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(payload [rows, n], the same transposed, scale [], largest magnitude []) of a gradient."""
    if format == "e4m3":
        return cast(grad, _past_of(grad) if largest is None else largest, True, True)
    wide, dtype = grad.to(torch.float32), DTYPES[format]
    scale = scale_of(wide, dtype, whole=True) if largest is None else delayed_scale(wide, largest[0], dtype)
    payload, columns = (rounded_by_past(t, scale, dtype).contiguous() for t in (wide, wide.t()))
    return payload, columns, scale, largest_of(wide)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
