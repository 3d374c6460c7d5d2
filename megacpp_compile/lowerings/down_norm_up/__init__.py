"""`megacpp::down_norm_up`: down-projection, RMSNorm of the latent, up-projection(s).

    x          [..., d]          w_down [k, d]     b_down [k] or None
    w_norm     [size] or None    w_up   list of [n_i, size]
    returns    up: list of [..., n_i];  rest [..., k - size]: the lanes of the down-projection that are not normed
               (MLA's rope key);  rrms [..., 1], the per-token reciprocal root mean square, float32 or better

The normed latent is lanes `start : start + size` of the down-projection; the rest lies wholly before or behind it.
x, w_down and b_down share a dtype, as do the w_up; the norm is computed in float32 (float64 for float64).
Saved for backward: x, the weights, rrms. The latent is computed again from x, so nothing of its width is kept.
Source: RMSNorm, https://arxiv.org/abs/1910.07467; MLA, https://arxiv.org/abs/2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import no_autocast
from megacpp_compile.lowerings._rotation import compute_dtype
from megacpp_compile.lowerings.down_norm_up import reference


@torch.library.custom_op("megacpp::down_norm_up", mutates_args=())
def down_norm_up(
    x: Tensor,
    w_down: Tensor,
    b_down: Optional[Tensor],  # noqa: UP045  custom_op reads typing.Optional on every supported torch
    w_norm: Optional[Tensor],  # noqa: UP045
    w_up: list[Tensor],
    eps: float,
    start: int,
    size: int,
) -> tuple[list[Tensor], Tensor, Tensor]:
    with no_autocast(x):
        up, rest, rrms = reference.down_norm_up(x, w_down, b_down, w_norm, w_up, eps, start, size)
        # `rest` is a slice of a buffer that dies here: own memory keeps the latent's half of it from living on.
        return up, rest.clone(memory_format=torch.contiguous_format), rrms


@down_norm_up.register_fake
def _(x, w_down, b_down, w_norm, w_up, eps, start, size):  # type: ignore[no-untyped-def]
    outer = x.shape[:-1]
    up = [x.new_empty((*outer, w.shape[0]), dtype=w.dtype) for w in w_up]
    rest = x.new_empty((*outer, w_down.shape[0] - size))
    return up, rest, x.new_empty((*outer, 1), dtype=compute_dtype(x.dtype))


@torch.library.custom_op("megacpp::down_norm_up_backward", mutates_args=())
def down_norm_up_backward(
    grad_up: list[Tensor],
    grad_rest: Tensor,
    x: Tensor,
    w_down: Tensor,
    b_down: Optional[Tensor],  # noqa: UP045
    w_norm: Optional[Tensor],  # noqa: UP045
    w_up: list[Tensor],
    rrms: Tensor,
    start: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    with no_autocast(x):
        return reference.down_norm_up_backward(grad_up, grad_rest, x, w_down, b_down, w_norm, w_up, rrms, start, size)


@down_norm_up_backward.register_fake
def _(grad_up, grad_rest, x, w_down, b_down, w_norm, w_up, rrms, start, size):  # type: ignore[no-untyped-def]
    def like(weight):  # type: ignore[no-untyped-def]
        return rrms.new_empty(0) if weight is None else weight.new_empty(weight.shape)

    return x.new_empty(x.shape), like(w_down), like(b_down), like(w_norm), [like(w) for w in w_up]


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, w_down, b_down, w_norm, w_up, _, ctx.start, ctx.size = inputs
    *_, rrms = output
    ctx.mark_non_differentiable(rrms)
    optional = [w for w in (b_down, w_norm) if w is not None]
    ctx.has = (b_down is not None, w_norm is not None)
    ctx.save_for_backward(x, w_down, rrms, *optional, *w_up)


def _backward(ctx, grad_up, grad_rest, _):  # type: ignore[no-untyped-def]
    x, w_down, rrms, *others = ctx.saved_tensors
    b_down = others.pop(0) if ctx.has[0] else None
    w_norm = others.pop(0) if ctx.has[1] else None
    # A list output's gradients are not materialised: an up-projection nobody used has None.
    grad_up = [x.new_zeros((*x.shape[:-1], w.shape[0]), dtype=w.dtype) if g is None else g
               for g, w in zip(grad_up, others, strict=True)]  # fmt: skip
    dx, dw, db, dn, du = down_norm_up_backward(
        grad_up, grad_rest, x, w_down, b_down, w_norm, others, rrms, ctx.start, ctx.size
    )
    return dx, dw, db if ctx.has[0] else None, dn if ctx.has[1] else None, du, None, None, None


down_norm_up.register_autograd(_backward, setup_context=_setup_context)
