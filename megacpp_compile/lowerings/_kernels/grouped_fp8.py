"""The GEMMs of `grouped` in float8, on CUDA: e4m3 payloads with a scale for every row of x and of a weight.

    forward    y = (x8 @ w8.T) * scale of x's row * scale of w's row
    backward   y = g8 @ w8, of the same w8: w's scales lie along what is summed there, so they are multiplied into the
               rows before these are rounded

GEMMs accumulate in the tensor cores' own 22 bits. Each op makes the payload of its rows and frees it; those of the
weights are made by ops of their own, `weights_fp8` for forward and `transposed_fp8` for backward, from the weight and
the scale that forward kept. Weights are as in `grouped`; of several parts (gate and up) those of one lie behind those
of the other; payloads are [E, parts * n, d] or transposed, scales [E, parts * n].
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.grouped import dtype_of, separate
from megacpp_compile.lowerings._op import kernel_op

FLOAT8 = torch.float8_e4m3fn


@kernel_op("grouped_gemms::weights_fp8")
def weights(weights: list[Tensor], parts: int) -> tuple[Tensor, Tensor]:
    """(payload [E, parts * n, d], scale [E, parts * n]) of `parts` times E weights [n, d]."""
    from megacpp_compile.lowerings._kernels import triton_quantise

    return triton_quantise.quantised_weights(separate(weights), parts)


@torch.library.register_fake("grouped_gemms::weights_fp8")
def _(weights, parts):  # type: ignore[no-untyped-def]
    first, (n, d) = weights[0], weights[0].shape[-2:]
    experts = first.shape[0] * len(weights) // parts if first.dim() == 3 else len(weights) // parts
    rows = experts, parts * n
    return first.new_empty((*rows, d), dtype=FLOAT8), first.new_empty(rows, dtype=torch.float32)


@kernel_op("grouped_gemms::transposed_fp8")
def transposed(weights: list[Tensor], scale: Tensor) -> Tensor:
    """The payload of `weights_fp8` as [E, d, parts * n], by its scale."""
    from megacpp_compile.lowerings._kernels import triton_quantise

    each = separate(weights)
    return triton_quantise.transposed_weights(each, len(each) // scale.shape[0], scale)


@torch.library.register_fake("grouped_gemms::transposed_fp8")
def _(weights, scale):  # type: ignore[no-untyped-def]
    return scale.new_empty((scale.shape[0], weights[0].shape[-1], scale.shape[1]), dtype=FLOAT8)


@kernel_op("grouped_gemms::rows_fp8")
def rows(
    x: Tensor,
    w8: Tensor,
    scale: Tensor,
    offsets: Tensor,
    take: Optional[Tensor] = None,  # noqa: UP045  kernel_op reads typing.Optional on every supported torch
    bias: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:
    """`x @ w.T` plus the group's bias of rows `take` [S, n], or of all."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    x8, x_scale = triton_quantise.quantised_rows(x)
    return hopper_grouped.rows([x8], [w8], offsets, False, take, (x_scale, scale), dtype_of(x, bias), bias)


@torch.library.register_fake("grouped_gemms::rows_fp8")
def _(x, w8, scale, offsets, take=None, bias=None):  # type: ignore[no-untyped-def]
    return x.new_empty(((x if take is None else take).shape[0], w8.shape[1]), dtype=dtype_of(x, bias))


@kernel_op("grouped_gemms::rows_back_fp8")
def rows_back(x: Tensor, w8: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
    """[S, d]: `x @ w` of x [S, parts * n]. w8: transposed."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    x8, x_scale = triton_quantise.quantised_rows(x, None, scale, offsets)
    return hopper_grouped.rows([x8], [w8], offsets, False, None, (x_scale, None), x.dtype)


@torch.library.register_fake("grouped_gemms::rows_back_fp8")
def _(x, w8, scale, offsets):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w8.shape[1]))


@kernel_op("grouped_gemms::gated_fp8")
def gated(
    x: Tensor,
    w8: Tensor,
    scale: Tensor,
    offsets: Tensor,
    take: Optional[Tensor],  # noqa: UP045
    activation: str,
    pair: bool,
    b_gate: Optional[Tensor] = None,  # noqa: UP045
    b_up: Optional[Tensor] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    """The three results of `grouped_gemms::gated`. w8: the gate's rows first; pair: whether the two were weights of
    their own, so that their results are."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    x8, x_scale = triton_quantise.quantised_rows(x)
    gates, ups = ([part] for part in w8.chunk(2, 1)) if pair else ([w8], [])
    return hopper_grouped.gated(x8, gates, ups, offsets, take, activation, (x_scale, scale), x.dtype, b_gate, b_up)


@torch.library.register_fake("grouped_gemms::gated_fp8")
def _(x, w8, scale, offsets, take, activation, pair, b_gate=None, b_up=None):  # type: ignore[no-untyped-def]
    slots, n = (x if take is None else take).shape[0], w8.shape[1] // 2
    first = x.new_empty((slots, n if pair else 2 * n), dtype=dtype_of(x, b_gate))
    second = x.new_empty((slots, n), dtype=dtype_of(x, b_up)) if pair else x.new_empty(0)
    return first, second, x.new_empty((slots, n))


@kernel_op("grouped_gemms::gradients_fp8")
def gradients(
    grad: Tensor,
    w8: Tensor,
    scale: Tensor,
    hidden: list[Tensor],
    gates: Tensor,
    offsets: Tensor,
    take: Optional[Tensor],  # noqa: UP045
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `grouped_gemms::gradients`. w8: transposed [E, n, d]; scale [E, d]."""
    from megacpp_compile.lowerings._kernels import hopper_grouped, triton_quantise

    g8, g_scale = triton_quantise.quantised_rows(grad, take, scale, offsets)
    return hopper_grouped.gradients(
        g8, [w8.transpose(-1, -2)], hidden, gates, offsets, None, activation, g_scale, grad.dtype
    )


@torch.library.register_fake("grouped_gemms::gradients_fp8")
def _(grad, w8, scale, hidden, gates, offsets, take, activation):  # type: ignore[no-untyped-def]
    slots, n = gates.shape[0], w8.shape[1]
    return grad.new_empty((slots, 2 * n)), grad.new_empty((slots, n)), gates.new_empty(slots)
