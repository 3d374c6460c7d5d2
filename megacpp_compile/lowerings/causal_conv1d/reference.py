"""`causal_conv1d` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

A sum of shifted products, without a convolution: pointwise code in the operand's own layout, which Inductor fuses with
what stands around it, where a convolution kernel would want time last and have copies made.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.causal_conv1d.layout import moved_to


def _shifted(x: Tensor, k: int) -> list[Tensor]:
    """k tensors [b, t, c]: x as it was k - 1, ..., 1, 0 steps earlier."""
    padded = F.pad(x, (0, 0, k - 1, 0))
    return [padded.narrow(1, j, x.shape[1]) for j in range(k)]


def _sum(terms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _before_activation(taps: list[Tensor], weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    pre = _sum([tap.to(dtype) * weight[:, j].to(dtype) for j, tap in enumerate(taps)])
    return pre if bias is None else pre + bias.to(dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype
) -> Tensor:
    pre = _before_activation(_shifted(x, weight.shape[1]), weight, bias, compute_dtype(x, weight))
    return moved_to((F.silu(pre) if activation == "silu" else pre).to(out_dtype), x)


def causal_conv1d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias (empty where there is none).

    With g the gradient before the activation: `dx[t] = sum_j weight[:, j] * g[t + (k - 1) - j]`, 0 behind the end;
    `dweight[:, j] = sum_t g[t] * x[t - (k - 1) + j]`.
    """
    dtype, k, t = compute_dtype(x, weight), weight.shape[1], x.shape[1]
    taps = _shifted(x, k)
    g = grad.to(dtype)
    if activation == "silu":
        pre = _before_activation(taps, weight, bias, dtype)
        s = torch.sigmoid(pre)
        g = g * (s * (1 + pre * (1 - s)))
    ahead = F.pad(g, (0, 0, 0, k - 1))
    dx = _sum([ahead.narrow(1, k - 1 - j, t) * weight[:, j].to(dtype) for j in range(k)])
    dw = torch.stack([(g * tap.to(dtype)).sum((0, 1)) for tap in taps], 1).to(weight.dtype)
    db = weight.new_empty(0) if bias is None else g.sum((0, 1)).to(bias.dtype)
    return moved_to(dx.to(x.dtype), x), dw, db
