"""`gated_rms_norm` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.rms import row_mean
from megacpp_compile.lowerings._op import compute_dtype

ACTIVATIONS = ("silu", "sigmoid")


def check(activation: str) -> None:
    assert activation in ACTIVATIONS, activation


def _groups(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // size, size))


def gated_rms_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    out_dtype: torch.dtype,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(y, z)
    check(activation)
    gate, h = (F.silu if activation == "silu" else torch.sigmoid)(z.to(dtype)), y.to(dtype)
    if not norm_before_gate:
        h = h * gate
    groups = _groups(h, group_size)
    rrms = torch.rsqrt(row_mean(groups.square()) + eps)
    out = (groups * rrms).flatten(-2)
    if weight is not None:
        out = out * weight.to(dtype)
    if norm_before_gate:
        out = out * gate
    return out.to(out_dtype).contiguous(), rrms.squeeze(-1).contiguous()


def gated_rms_norm_backward(
    grad: Tensor,
    y: Tensor,
    z: Tensor,
    weight: Tensor | None,
    rrms: Tensor,
    group_size: int,
    norm_before_gate: bool,
    activation: str = "silu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y, z and weight (empty where there is none).

    With h what is normed, n = h * rrms and g the gradient of n: `dh = rrms * (g - n * mean(g * n))` in each group.
    """
    dtype = rrms.dtype
    grad, wide_y, wide_z = grad.to(dtype), y.to(dtype), z.to(dtype)
    s = torch.sigmoid(wide_z)
    gate, slope = (wide_z * s, s * (1 + wide_z * (1 - s))) if activation == "silu" else (s, s * (1 - s))
    scale = rrms.unsqueeze(-1)
    w = 1 if weight is None else weight.to(dtype)
    normed = (_groups(wide_y if norm_before_gate else wide_y * gate, group_size) * scale).flatten(-2)
    behind = grad * gate if norm_before_gate else grad  # the gradient behind the weight
    dw = rrms.new_empty(0)
    if weight is not None:
        rows = behind * normed
        dw = (rows.flatten(0, -2).sum(0) if rows.dim() > 1 else rows).to(weight.dtype)
    g, n = _groups(behind * w, group_size), _groups(normed, group_size)
    dh = (scale * (g - n * row_mean(g * n))).flatten(-2)
    if norm_before_gate:
        dy, dz = dh, grad * normed * w * slope
    else:
        dy, dz = dh * gate, dh * wide_y * slope
    return dy.to(y.dtype).contiguous(), dz.to(z.dtype).contiguous(), dw
