"""`down_norm_up` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.rms import input_gradient, row_mean
from megacpp_compile.lowerings._op import compute_dtype


def rest_slice(start: int, size: int, total: int) -> slice:
    """The channels of the down-projection that are not normed: all before `start`, or all behind the latent."""
    return slice(0, start) if start else slice(size, total)


def down_projection(
    x: Tensor, w_down: Tensor, b_down: Tensor | None, eps: float, start: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the down-projection, the latent in it, that latent in its compute dtype, rrms)."""
    down = F.linear(x, w_down, b_down)
    raw = down[..., start : start + size]
    latent = raw.to(compute_dtype(down.dtype))
    return down, raw, latent, torch.rsqrt(row_mean(latent.square()) + eps)


def down_norm_up(
    x: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    w_norm: Tensor | None,
    w_up: list[Tensor],
    eps: float,
    start: int,
    size: int,
    keep_latent: bool = False,
    project: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    down, raw, latent, rrms = down_projection(x, w_down, b_down, eps, start, size)
    normed = latent * rrms
    if w_norm is not None:
        normed = normed * w_norm.to(normed.dtype)
    up = [project(normed.to(w.dtype), w) for w in w_up]
    kept = raw if keep_latent else rrms.new_empty(0)
    return up, down[..., rest_slice(start, size, down.shape[-1])], rrms, kept


def recompute_latent(x: Tensor, w_down: Tensor, b_down: Tensor | None, start: int, size: int) -> Tensor:
    """The latent [..., size] before its norm, recomputed from x."""
    rows = slice(start, start + size)
    return F.linear(x, w_down[rows], None if b_down is None else b_down[rows])


def down_norm_up_backward(
    grad_up: list[Tensor],
    grad_rest: Tensor,
    x: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    w_norm: Tensor | None,
    w_up: list[Tensor],
    rrms: Tensor,
    start: int,
    size: int,
    latent: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of x, w_down, b_down, w_norm (empty where there is none) and w_up.

    The latent, if not given, is recomputed from x; `grad_latent = rrms * (g - normed * mean(g * normed))`.
    """
    latent = recompute_latent(x, w_down, b_down, start, size) if latent is None else latent
    normed = latent.to(rrms.dtype) * rrms
    scaled = normed if w_norm is None else normed * w_norm.to(normed.dtype)

    flat_up = [grad.flatten(0, -2).t() for grad in grad_up]
    d_up = [g @ scaled.to(w.dtype).flatten(0, -2) for g, w in zip(flat_up, w_up, strict=True)]
    d_latent, d_norm = input_gradient(normed, w_norm, grad_up, w_up, rrms)
    d_latent = d_latent.to(x.dtype)

    rest = grad_rest.to(x.dtype)
    d_down = torch.cat((rest, d_latent) if start else (d_latent, rest), -1)
    flat = d_down.flatten(0, -2)
    d_bias = rrms.new_empty(0) if b_down is None else flat.to(rrms.dtype).sum(0).to(b_down.dtype)
    return d_down @ w_down, flat.t() @ x.flatten(0, -2), d_bias, d_norm, d_up
