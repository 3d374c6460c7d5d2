"""The GEMMs of `grouped` in float8, on CUDA: e4m3 payloads with a scale for every row of x and of a weight.

    forward    y = (x8 @ w8.T) * scale of x's row * scale of w's row
    backward   y = g8 @ w8, of the same w8: w's scales lie along what is summed there, so they are multiplied into the
               rows before these are rounded. w8 is recomputed, from the weight and the scale that forward kept

GEMMs accumulate in the tensor cores' own 22 bits. Each op makes the payloads it needs and frees them. Weights are as in
`grouped`; of several parts (gate and up) those of one lie behind those of the other; scales are [E, parts * n].
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.grouped import dtype_of, separate
from megacpp_compile.lowerings._op import kernel_op


@kernel_op("grouped_gemms::rows_fp8")
def rows(
    x: Tensor,
    weights: list[Tensor],
    offsets: Tensor,
    take: Optional[Tensor] = None,  # noqa: UP045  kernel_op reads typing.Optional on every supported torch
    bias: Optional[Tensor] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    """(`x @ w.T` plus the group's bias of rows `take` [S, n], or of all; the weights' scales [E, n])."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    x8, x_scale = triton_quantise.quantised_rows(x)
    w8, scale = triton_quantise.quantised_weights(separate(weights), 1)
    return hopper_grouped.rows([x8], [w8], offsets, False, take, (x_scale, scale), dtype_of(x, bias), bias), scale


@torch.library.register_fake("grouped_gemms::rows_fp8")
def _(x, weights, offsets, take=None, bias=None):  # type: ignore[no-untyped-def]
    n = weights[0].shape[-2]
    rows = (x if take is None else take).shape[0]
    return x.new_empty((rows, n), dtype=dtype_of(x, bias)), _scales(x, offsets, n)


@kernel_op("grouped_gemms::rows_back_fp8")
def rows_back(x: Tensor, weights: list[Tensor], scale: Tensor, offsets: Tensor) -> Tensor:
    """[S, d]: `x @ w` of x [S, parts * n] and weights [n, d]. scale: theirs in forward."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    x8, x_scale = triton_quantise.quantised_rows(x, None, scale, offsets)
    w8 = _turned(weights, scale)
    return hopper_grouped.rows([x8], [w8], offsets, False, None, (x_scale, None), x.dtype)


@torch.library.register_fake("grouped_gemms::rows_back_fp8")
def _(x, weights, scale, offsets):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], weights[0].shape[-1]))


@kernel_op("grouped_gemms::gated_fp8")
def gated(
    x: Tensor,
    w_gate: list[Tensor],
    w_up: list[Tensor],
    offsets: Tensor,
    take: Optional[Tensor],  # noqa: UP045
    activation: str,
    b_gate: Optional[Tensor] = None,  # noqa: UP045
    b_up: Optional[Tensor] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three results of `grouped_gemms::gated`, and the weights' scales, the gate's first [E, 2n]."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    x8, x_scale = triton_quantise.quantised_rows(x)
    w8, scale = triton_quantise.quantised_weights(separate([*w_gate, *w_up]), 2 if w_up else 1)
    gates, ups = ([part] for part in w8.chunk(2, 1)) if w_up else ([w8], [])
    h_gate, h_up, a = hopper_grouped.gated(
        x8, gates, ups, offsets, take, activation, (x_scale, scale), x.dtype, b_gate, b_up
    )
    return h_gate, h_up, a, scale


@torch.library.register_fake("grouped_gemms::gated_fp8")
def _(x, w_gate, w_up, offsets, take, activation, b_gate=None, b_up=None):  # type: ignore[no-untyped-def]
    slots, n = (x if take is None else take).shape[0], w_gate[0].shape[-2]
    up, a = (x.new_empty((slots, n), dtype=dtype_of(x, b_up)), n) if w_up else (x.new_empty(0), n // 2)
    return x.new_empty((slots, n), dtype=dtype_of(x, b_gate)), up, x.new_empty((slots, a)), _scales(x, offsets, 2 * a)


@kernel_op("grouped_gemms::gradients_fp8")
def gradients(
    grad: Tensor,
    weights: list[Tensor],
    scale: Tensor,
    hidden: list[Tensor],
    gates: Tensor,
    offsets: Tensor,
    take: Optional[Tensor],  # noqa: UP045
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `grouped_gemms::gradients`. scale: the weights' in forward [E, d]."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    g8, g_scale = triton_quantise.quantised_rows(grad, take, scale, offsets)
    w8 = _turned(weights, scale)
    return hopper_grouped.gradients(
        g8, [w8.transpose(-1, -2)], hidden, gates, offsets, None, activation, g_scale, grad.dtype
    )


@torch.library.register_fake("grouped_gemms::gradients_fp8")
def _(grad, weights, scale, hidden, gates, offsets, take, activation):  # type: ignore[no-untyped-def]
    slots, n = gates.shape[0], weights[0].shape[-1]
    return grad.new_empty((slots, 2 * n)), grad.new_empty((slots, n)), gates.new_empty(slots)


def _turned(weights: list[Tensor], scale: Tensor) -> Tensor:
    from megacpp_compile.lowerings._kernels import triton_quantise

    each = separate(weights)
    return triton_quantise.turned_weights(each, len(each) // scale.shape[0], scale)


def _scales(x: Tensor, offsets: Tensor, n: int) -> Tensor:
    return x.new_empty((offsets.shape[0], n), dtype=torch.float32)
