"""`down_norm_up` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.rms import input_gradient, row_mean
from megacpp_compile.lowerings._op import compute_dtype, linear


def rest_slice(start: int, size: int, total: int) -> slice:
    """The channels of the down-projection that are not normed: all before `start`, or all behind the latent."""
    return slice(0, start) if start else slice(size, total)


def beside(
    down: Tensor, x_side: Tensor | None, w_side: Tensor | None, sum_dtype: torch.dtype | None = None
) -> Tensor:
    """The down-projection with the low-rank path beside it, if there is one, in `sum_dtype` or its own."""
    dtype = sum_dtype or down.dtype
    if x_side is None or w_side is None:
        return down.to(dtype)
    return (down.to(dtype) + F.linear(x_side, w_side)).to(dtype)


def down_projection(
    x: Tensor, w_down: Tensor, b_down: Tensor | None, eps: float, start: int, size: int, x_side: Tensor | None = None,
    w_side: Tensor | None = None, sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(the down-projection, the latent in it, that latent in its compute dtype, rrms)."""
    down = beside(linear(x, w_down, b_down), x_side, w_side, sum_dtype)
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
    x_side: Tensor | None = None,
    w_side: Tensor | None = None,
    normed: torch.dtype | None = None,
    group: str | None = None,
    sum_dtype: torch.dtype | None = None,
    project: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    down, raw, latent, rrms = down_projection(x, w_down, b_down, eps, start, size, x_side, w_side, sum_dtype)
    scaled = latent * rrms
    if w_norm is not None:
        scaled = scaled * w_norm.to(scaled.dtype)
    up = [project(scaled.to(w.dtype), w) for w in w_up]
    up += [] if normed is None else [scaled.to(normed)]
    kept = raw if keep_latent else rrms.new_empty(0)
    return up, down[..., rest_slice(start, size, down.shape[-1])], rrms, kept


def recompute_latent(
    x: Tensor, w_down: Tensor, b_down: Tensor | None, start: int, size: int, x_side: Tensor | None = None,
    w_side: Tensor | None = None, sum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The latent [..., size] before its norm, recomputed from x."""
    rows = slice(start, start + size)
    latent = linear(x, w_down[rows], None if b_down is None else b_down[rows])
    return beside(latent, x_side, None if w_side is None else w_side[rows], sum_dtype)


def side_gradients(d_down: Tensor, x_side: Tensor | None, w_side: Tensor | None, rrms: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x_side and w_side from that of the down-projection; empty where there is no path beside it."""
    if x_side is None or w_side is None:
        return rrms.new_empty(0), rrms.new_empty(0)
    d_down = d_down.to(x_side.dtype)
    return d_down @ w_side, d_down.flatten(0, -2).t() @ x_side.flatten(0, -2)


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
    x_side: Tensor | None = None,
    w_side: Tensor | None = None,
    grad_normed: Tensor | None = None,
    grad_latent: Tensor | None = None,
    grad_whole: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], Tensor, Tensor]:
    """Gradients of x, w_down, b_down, w_norm (empty where there is none), w_up, x_side and w_side (empty likewise).

    The latent, if not given, is recomputed from x; `grad_latent = rrms * (g - normed * mean(g * normed))`.
    grad_normed, grad_latent: gradients of the op's results of these names, where something reads them. grad_whole: the
    gradient of the normed latent, all in all, where it is not grad_up's and grad_normed's share on this rank alone.
    """
    if latent is None:
        latent = recompute_latent(x, w_down, b_down, start, size, x_side, w_side, sum_dtype)
    normed = latent.to(rrms.dtype) * rrms
    scaled = normed if w_norm is None else normed * w_norm.to(normed.dtype)

    flat_up = [grad.flatten(0, -2).t() for grad in grad_up]
    d_up = [g @ scaled.to(w.dtype).flatten(0, -2) for g, w in zip(flat_up, w_up, strict=True)]
    if grad_whole is None:
        d_latent, d_norm = input_gradient(normed, w_norm, grad_up, w_up, rrms, grad_normed)
    else:
        d_latent, d_norm = input_gradient(normed, w_norm, [], [], rrms, grad_whole)
    if grad_latent is not None:
        d_latent = d_latent + grad_latent.to(d_latent.dtype)
    d_latent = d_latent.to(x.dtype)

    rest = grad_rest.to(x.dtype)
    d_down = torch.cat((rest, d_latent) if start else (d_latent, rest), -1)
    flat = d_down.flatten(0, -2)
    d_bias = rrms.new_empty(0) if b_down is None else flat.to(rrms.dtype).sum(0).to(b_down.dtype)
    d_sides = side_gradients(d_down, x_side, w_side, rrms)
    return d_down @ w_down, flat.t() @ x.flatten(0, -2), d_bias, d_norm, d_up, *d_sides
