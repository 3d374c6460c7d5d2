"""FP8 for several ops: rounding by the largest magnitude, widening inside an op, and cuBLASLt's GEMM.

A payload is float8_e4m3fn or float8_e5m2, its scale the factor that gives back the value: `value = payload * scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile._torch import ops

# Channels that share a scale in block-scaled fp8 (DeepSeek-V3's recipe, https://arxiv.org/abs/2412.19437).
SCALE_BLOCK = 128


def fp8_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """a @ b.T + bias of payloads [m, k] and [n, k], in `dtype`, by cuBLASLt; k is contiguous in both. Scales are one
    number each, or [m, 1] and [1, n]. fast: sum in the tensor cores' own 22 bits."""
    fused = None if bias is None or dtype == torch.float32 else bias.to(dtype)  # which it adds in half precision only
    y = ops.scaled_mm(a, b.t(), a_scale, b_scale, bias=fused, out_dtype=dtype, use_fast_accum=fast)
    return y + bias if bias is not None and fused is None else y


def round_to_fp8(x: Tensor, dtype: torch.dtype, whole: bool = False) -> tuple[Tensor, Tensor]:
    """(payload, scale) of `x` by current scaling: the largest magnitude of a row (of all, with `whole`) becomes the
    dtype's largest number. Scale is x's dtype, [..., 1] or of no dimension; 1 where all is zero. With `whole` infinite
    numbers become NaN and count for no scale, as do those that are none: what they stand in is seen to overflow, and
    rows beside it keep theirs."""
    scale = scale_of(x, dtype, whole)
    return rounded_by(torch.where(_finite(x), x, x.new_full((), torch.nan)) if whole else x, scale, dtype), scale


def scale_of(x: Tensor, dtype: torch.dtype, whole: bool = False) -> Tensor:
    """The scale of `round_to_fp8`; never subnormal, even if all of x is."""
    if x.numel() == 0:
        return x.new_ones(() if whole else (*x.shape[:-1], 1))
    return scale_from(largest_finite(x) if whole else x.abs().amax(-1, keepdim=True), dtype)


def largest_of(x: Tensor) -> Tensor:
    """The largest magnitude of `x` [], 0 where it is empty."""
    # Every dimension by name: an `amax` of none leaves its operand as it is on XLA (torch_xla 2.9).
    return x.abs().amax(tuple(range(x.dim()))) if x.numel() else x.new_zeros(())


def largest_finite(x: Tensor) -> Tensor:
    """`largest_of` the numbers of `x` that are finite."""
    return largest_of(torch.where(_finite(x), x, 0))


def _finite(x: Tensor) -> Tensor:
    return x.abs() < x.new_full((), torch.inf)  # XLA has a number as one of float64, which TPUs lack


def scale_from(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that maps `largest` to the dtype's largest number; a normal number, and 1 where `largest` is 0."""
    return torch.where(largest > 0, (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(largest.dtype).tiny), 1)


def rounded_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, saturated at its largest number: neither infinite nor NaN."""
    limit = torch.finfo(dtype).max
    return (x / scale).clamp(-limit, limit).to(dtype)


def widened(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The payload's numbers in `dtype`, exactly; for use inside an op, whose operands stay fp8 in memory."""
    return payload.to(dtype)


# --- scales from what a tensor's past held

# A tensor without a past has the scale of MARGIN times the largest of a sample of SAMPLE x SAMPLE of its numbers:
# normally distributed ones are saturated from some 50 times their root mean square on, and keep three bits of mantissa
# down to a 500th of it. What a past has shown is left ROOM to grow: e4m3 pays with a bit of range, not of mantissa.
MARGIN, SAMPLE, ROOM = 16.0, 32, 2.0


def delayed_scale(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of float32 `x` [..., k] that `largest` [] gives, the largest magnitude of its past; where that is 0, as
    it is before there is one, the scale that the finite numbers of a sample of x give."""
    rows = x.flatten(0, -2)
    sample = _sampled(_sampled(rows, 0), 1) if rows.numel() else rows.new_zeros(1, 1)
    return scale_from(torch.where(largest > 0, ROOM * largest, MARGIN * largest_finite(sample)), dtype)


def _sampled(x: Tensor, dim: int) -> Tensor:
    """SAMPLE entries of x along a dimension, evenly spaced; all where there are fewer."""
    size = x.shape[dim]
    if isinstance(size, int):
        step = max(1, size // SAMPLE)
        return x[(slice(None),) * dim + (slice(0, SAMPLE * step, step),)]
    # No slice has a symbolic step; the last entry stands for those behind it. Tensors are compared, not sizes, which
    # would guard the frame.
    step = torch.full((), size // SAMPLE, dtype=torch.int64, device=x.device).clamp(min=1)
    places = torch.arange(SAMPLE, device=x.device) * step
    return x.index_select(dim, places.clamp(max=size - 1))


def rounded_by_past(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`rounded_by` for a scale that x itself does not bound: finite numbers are saturated, infinite ones become NaN, so
    that an overflow is seen behind it."""
    return rounded_by(x + (x - x), scale, dtype)
