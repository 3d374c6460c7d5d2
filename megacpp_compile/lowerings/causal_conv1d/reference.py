"""`causal_conv1d` and its backward in plain PyTorch: their meaning, what a CPU runs, and the oracle.

A sum of shifted products, without a convolution: pointwise code in the operand's own layout, which Inductor fuses with
what stands around it, where a convolution kernel would want time last and have copies made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.causal_conv1d.layout import moved_to

Pad = Callable[[Tensor, int, int], Tensor]


def with_zeros(x: Tensor, front: int, behind: int) -> Tensor:
    """x [b, t, c] with so many steps of zeros in front of it and behind it."""
    return F.pad(x, (0, 0, front, behind))


def _shifted(x: Tensor, k: int, seq_idx: Tensor | None, pad: Pad) -> list[Tensor]:
    """k tensors [b, t, c]: x as it was k - 1, ..., 1, 0 steps earlier, 0 where that was in another document."""
    padded = pad(x, k - 1, 0)
    taps = [padded.narrow(1, j, x.shape[1]) for j in range(k)]
    if seq_idx is None:
        return taps
    return [torch.where(same, tap, 0) for same, tap in zip(_same(seq_idx, k), taps, strict=True)]


def _same(seq_idx: Tensor, k: int) -> list[Tensor]:
    """k masks [b, t, 1]: whether the step k - 1, ..., 1, 0 before is of the same document. What lies before time 0 is
    taken for document 0: x is 0 there."""
    padded = F.pad(seq_idx, (k - 1, 0))
    return [(padded.narrow(1, j, seq_idx.shape[1]) == seq_idx).unsqueeze(-1) for j in range(k)]


def _sum(terms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _before_activation(taps: list[Tensor], weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    pre = _sum([tap.to(dtype) * weight[:, j].to(dtype) for j, tap in enumerate(taps)])
    return pre if bias is None else pre + bias.to(dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype,
    seq_idx: Tensor | None = None, pad: Pad = with_zeros,
) -> Tensor:  # fmt: skip
    pre = _before_activation(_shifted(x, weight.shape[1], seq_idx, pad), weight, bias, compute_dtype(x, weight))
    return moved_to((F.silu(pre) if activation == "silu" else pre).to(out_dtype), x)


def causal_conv1d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, seq_idx: Tensor | None = None,
    pad: Pad = with_zeros,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight and bias (empty where there is none).

    With g the gradient before the activation: `dx[t] = sum_j weight[:, j] * g[t + (k - 1) - j]`, 0 behind the end
    and where the step of g is of another document than t;
    `dweight[:, j] = sum_t g[t] * x[t - (k - 1) + j]`.
    """
    dtype, k, t = compute_dtype(x, weight), weight.shape[1], x.shape[1]
    taps = _shifted(x, k, seq_idx, pad)
    g = grad.to(dtype)
    if activation == "silu":
        pre = _before_activation(taps, weight, bias, dtype)
        s = torch.sigmoid(pre)
        g = g * (s * (1 + pre * (1 - s)))
    # g[t] goes to as many inputs as it has taps, but none of another document.
    kept = [g] if seq_idx is None else [torch.where(same, g, 0) for same in _same(seq_idx, k)]
    ahead = [pad(one, 0, k - 1) for one in kept] * (k // len(kept))
    dx = _sum([ahead[j].narrow(1, k - 1 - j, t) * weight[:, j].to(dtype) for j in range(k)])
    dw = torch.stack([(g * tap.to(dtype)).sum((0, 1)) for tap in taps], 1).to(weight.dtype)
    db = weight.new_empty(0) if bias is None else g.sum((0, 1)).to(bias.dtype)
    return moved_to(dx.to(x.dtype), x), dw, db
