"""`norm_linear` and its backward in plain PyTorch: their meaning, their lowering on every target, and the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.rms import input_gradient, row_mean
from megacpp_compile.lowerings._op import compute_dtype, linear


def norm_linear(
    x: Tensor, w_norm: Tensor | None, w: list[Tensor], b: list[Tensor], eps: float
) -> tuple[list[Tensor], Tensor]:
    wide = x.to(compute_dtype(x.dtype))
    rrms = torch.rsqrt(row_mean(wide.square()) + eps)
    normed = wide * rrms
    if w_norm is not None:
        normed = normed * w_norm.to(normed.dtype)
    normed = normed.to(w[0].dtype)
    return [linear(normed, one, b[i] if b else None) for i, one in enumerate(w)], rrms


def norm_linear_backward(
    grad: list[Tensor], x: Tensor, w_norm: Tensor | None, w: list[Tensor], rrms: Tensor, biased: bool
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients of x, w_norm (empty where there is none), w, and of the biases."""
    normed = x.to(rrms.dtype) * rrms
    scaled = (normed if w_norm is None else normed * w_norm.to(normed.dtype)).to(w[0].dtype).flatten(0, -2)
    d_w = [g.flatten(0, -2).t() @ scaled for g in grad]
    d_b = [g.flatten(0, -2).to(rrms.dtype).sum(0).to(g.dtype) for g in grad] if biased else []
    d_x, d_norm = input_gradient(normed, w_norm, grad, w, rrms)
    return d_x.to(x.dtype), d_norm, d_w, d_b
