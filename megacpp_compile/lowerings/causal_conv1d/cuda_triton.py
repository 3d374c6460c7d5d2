"""`causal_conv1d` on CUDA: one kernel forward, one backward, channels adjacent.

A program owns some channels over a segment of steps and walks through time with the last few operands and gradients in
registers, so that x and the gradient are read once and the result, or the input gradient, is written once. It takes
four steps at a time, with the loads of the next four under way. The gradients of weight and bias are partial sums per
segment, added up afterwards in a fixed order. With more taps than that is for, a program of the forward makes a tile of
steps x channels, and the taps' loads hit the same cache lines, in L1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.columns import Columns
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, interpreted, is_wide, power_of_2
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.causal_conv1d._triton_kernels import (
    causal_conv1d_steps,
    causal_conv1d_tile,
    causal_conv1d_walk,
)
from megacpp_compile.lowerings.causal_conv1d.layout import channels_adjacent, laid_out_as

__all__ = ["MIN_BYTES", "causal_conv1d", "causal_conv1d_backward", "supports", "writes_into"]

# Bytes of the largest operand from which this gains on what Inductor makes of the reference (H200).
MIN_BYTES = 8 << 20
# Taps the backward kernel keeps in registers; the convolutions of state-space models have 2 to 4.
MAX_TAPS = 4
# Programs a launch may have along its second and third axis.
MAX_GRID = 65535


_tile = Kernel(
    causal_conv1d_tile,
    [{"BT": bt, "BC": bc, "num_warps": 4} for bt in (8, 16, 32) for bc in (128, 256)],
    key=("channels", "TAPS"),
)
_steps = Kernel(
    causal_conv1d_steps,
    [{"BC": bc, "num_warps": warps} for bc, warps in ((128, 1), (256, 2), (256, 1), (512, 4))],
    key=("channels", "TAPS"),
)
_walk = Kernel(
    causal_conv1d_walk,
    [{"BC": bc, "num_warps": warps} for bc, warps in ((64, 1), (128, 1), (128, 2), (256, 2), (256, 4), (512, 4))],
    key=("channels", "TAPS"),
)
# Steps that a program walks through, forward and backward: the quickest on an H100.
FORWARD_SEGMENT, SEGMENT = 64, 128


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    x, weight = args[:2] if name == "causal_conv1d" else args[1:3]
    if not channels_adjacent(x) or not statically_known_true(x.stride(2) == 1):
        return "channels are not adjacent in memory"
    if any(isinstance(n, int) and n == 0 for n in x.shape):
        return "there is nothing to convolve"
    if isinstance(x.shape[0], int) and x.shape[0] > MAX_GRID:
        return f"more than {MAX_GRID} sequences"
    taps = weight.shape[1]
    if name == "causal_conv1d":
        return None if taps <= 16 else f"{taps} taps; the kernel adds up 16 at most"
    return None if 2 <= taps <= MAX_TAPS else f"{taps} taps; the kernel keeps 2 to {MAX_TAPS} in registers"


def writes_into(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    return (0,) if name == "causal_conv1d_backward" else ()


def _shared(
    weight: Tensor, bias: Tensor | None, activation: str, x: Tensor, seq_idx: Tensor | None
) -> dict[str, Any]:
    return {
        "seq_idx": x if seq_idx is None else seq_idx, "sb": 0 if seq_idx is None else seq_idx.stride(0),
        "st": 0 if seq_idx is None else seq_idx.stride(1), "PACKED": int(seq_idx is not None),
        "weight": weight, "bias": weight if bias is None else bias, "wc": weight.stride(0), "wk": weight.stride(1),
        "bias_c": 0 if bias is None else bias.stride(0), "TAPS": weight.shape[1], "BIAS": int(bias is not None),
        "SILU": int(activation == "silu"), "WIDE": int(is_wide(x.dtype, weight.dtype)),
        "EXACT": int(is_wide(x.dtype, weight.dtype) or interpreted()),
        "steps": x.shape[1], "channels": x.shape[2], "x": x, "xb": x.stride(0), "xt": x.stride(1),
    }  # fmt: skip


def _block(channels: Any, most: int) -> int:
    return most if not isinstance(channels, int) else min(most, power_of_2(channels))


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype,
    seq_idx: Tensor | None = None,
) -> Tensor:  # fmt: skip
    y = laid_out_as(x, out_dtype)
    batch, steps, channels = x.shape
    args = {"y": y, "yb": y.stride(0), "yt": y.stride(1), **_shared(weight, bias, activation, x, seq_idx)}
    if 2 <= weight.shape[1] <= MAX_TAPS:
        _steps(
            lambda meta: (triton.cdiv(steps, FORWARD_SEGMENT), triton.cdiv(channels, meta["BC"]), batch),
            {"BC": _block(channels, 256), "num_warps": 2}, SEGMENT=FORWARD_SEGMENT, **args,
        )  # fmt: skip
        return y
    _tile(
        lambda meta: (triton.cdiv(steps, meta["BT"]), triton.cdiv(channels, meta["BC"]), batch),
        {"BT": 32, "BC": _block(channels, 128), "num_warps": 4}, **args,
    )  # fmt: skip
    return y


def causal_conv1d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, seq_idx: Tensor | None = None,
    into: Mapping[int, Columns] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not statically_known_true(grad.stride(2) == 1):  # a sum's gradient is one number, expanded
        grad = grad.contiguous()
    batch, steps, channels = x.shape
    if into is None:
        dx = laid_out_as(x, x.dtype)
        place = {"dx": dx, "db": dx.stride(0), "dt": dx.stride(1), "dx_first": 0}
    else:
        columns = into[0]
        dx = columns.of(batch, steps, like=x)
        place = {"dx": dx, "db": steps * columns.width, "dt": columns.width, "dx_first": columns.first}
    taps, segments = weight.shape[1], triton.cdiv(steps, SEGMENT)
    wide = compute_dtype(x, weight)
    partial = torch.empty((batch * segments, taps + 1, channels), dtype=wide, device=x.device)
    _walk(
        lambda meta: (segments, triton.cdiv(channels, meta["BC"]), batch),
        {"BC": _block(channels, 256), "num_warps": 2},
        grad=grad, gb=grad.stride(0), gt=grad.stride(1), **place, partial=partial, segments=segments,
        SEGMENT=SEGMENT, **_shared(weight, bias, activation, x, seq_idx),
    )  # fmt: skip
    sums = partial.sum(0)
    d_bias = weight.new_empty(0) if bias is None else sums.select(0, taps).to(bias.dtype)
    return dx, sums.narrow(0, 0, taps).t().to(weight.dtype, memory_format=torch.contiguous_format), d_bias
