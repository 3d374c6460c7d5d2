"""`megacpp::down_norm_up`: down-projection, RMSNorm of the latent, up-projection(s).

    x          [..., d]          w_down [k, d]     b_down [k] or None
    w_norm     [size] or None    w_up   list of [n_i, size]
    x_side     [..., r]          w_side [k, r]: a low-rank path added to the down-projection (LoRA), or None
    sum_dtype  in which the path is added, and of rest and latent (LoRA under autocast: float32); None: that of x
    returns    up: list of [..., n_i], and behind them, where `normed` is a dtype, the normed latent [..., size] in it;
               rest [..., k - size]: the channels of the down-projection that are not normed (MLA's rope key);
               rrms [..., 1], the per-token reciprocal root mean square, float32 or better;
               latent [..., size] as it was before the norm with `keep_latent`, else empty

The normed latent is channels `start : start + size` of the down-projection; the rest lies wholly before or behind it.
group: the name of a process group whose ranks hold the same latent and project it with weights of their own, as under
tensor parallelism: the gradient through the up-projections is summed over them before the norm's backward.
x, w_down and b_down share a dtype, as do x_side and w_side; the norm is computed in float32 (float64 for float64).
Saved for backward: x, x_side, the weights, rrms. The latent is recomputed from x, so nothing of its width is kept,
unless `keep_latent` saves it, in the down-projection's own buffer, and with it the time of that GEMM.
Source: RMSNorm, https://arxiv.org/abs/1910.07467; MLA, https://arxiv.org/abs/2405.04434, section 2.1.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import elements, hint, rows
from megacpp_compile.lowerings._op import compute_dtype, define_op
from megacpp_compile.lowerings._sum_gradient import summed
from megacpp_compile.lowerings._traits import OptionalSavedOutput, OpTraits, declare
from megacpp_compile.lowerings.down_norm_up import reference


def _outside(*args: Any) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    up, rest, rrms, latent = reference.down_norm_up(*args)
    # `rest` is a slice of a buffer that dies here: own memory keeps the latent's half of it from living on.
    return up, rest.clone(memory_format=torch.contiguous_format), rrms, latent


@define_op(reference.down_norm_up, outside=_outside)
def down_norm_up(  # type: ignore[no-untyped-def]
    x, w_down, b_down, w_norm, w_up, eps, start, size, keep_latent=False, x_side=None, w_side=None, normed=None,
    group=None, sum_dtype=None,
):  # fmt: skip
    outer = x.shape[:-1]
    rrms = x.new_empty((*outer, 1), dtype=compute_dtype(x.dtype, sum_dtype))
    down = x.new_empty((*outer, w_down.shape[0]), dtype=sum_dtype)
    latent = down[..., start : start + size] if keep_latent else rrms.new_empty(0)
    up = [x.new_empty((*outer, w.shape[0]), dtype=w.dtype) for w in w_up]
    up += [] if normed is None else [x.new_empty((*outer, size), dtype=normed)]
    rest = down.new_empty((*outer, w_down.shape[0] - size))
    return up, rest, rrms, latent


@define_op(reference.down_norm_up_backward)
def down_norm_up_backward(  # type: ignore[no-untyped-def]
    grad_up, grad_rest, x, w_down, b_down, w_norm, w_up, rrms, start, size, latent=None, x_side=None, w_side=None,
    grad_normed=None, grad_latent=None, grad_whole=None, sum_dtype=None,
):  # fmt: skip
    def like(weight):  # type: ignore[no-untyped-def]
        return rrms.new_empty(0) if weight is None else weight.new_empty(weight.shape)

    d_up = [like(w) for w in w_up]
    return x.new_empty(x.shape), like(w_down), like(b_down), like(w_norm), d_up, like(x_side), like(w_side)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, w_down, b_down, w_norm, w_up, _, ctx.start, ctx.size, keep_latent, x_side, w_side, normed, *more = inputs
    ctx.group, ctx.sum_dtype = more
    *_, rrms, latent = output
    ctx.mark_non_differentiable(rrms, *([] if keep_latent else [latent]))
    ctx.set_materialize_grads(False)
    ctx.ups, ctx.normed = len(w_up), normed is not None
    kept = latent if keep_latent else None
    ctx.save_for_backward(x, w_down, b_down, w_norm, rrms, kept, x_side, w_side, *w_up)


def _backward(ctx, grad_up, grad_rest, _, grad_latent):  # type: ignore[no-untyped-def]
    x, w_down, b_down, w_norm, rrms, latent, x_side, w_side, *ups = ctx.saved_tensors
    grad_normed = grad_up[ctx.ups] if ctx.normed else None
    # An up-projection that no loss depends on, such as an indexer's, has no gradient, as in eager.
    used = [i for i, g in enumerate(grad_up[: ctx.ups]) if g is not None]
    through = used or [0]
    outer = x.shape[:-1]
    grad_rest = x.new_zeros((*outer, w_down.shape[0] - ctx.size)) if grad_rest is None else grad_rest
    w_up = [ups[i] for i in through]
    grad_up = [grad_up[i] for i in used] or [w_up[0].new_zeros((*outer, w_up[0].shape[0]))]
    whole = None
    if ctx.group is not None and used:  # what reads the normed latent itself is the same on every rank
        whole = summed(functools.reduce(operator.add, (g @ w for g, w in zip(grad_up, w_up, strict=True))), ctx.group)
        whole, grad_normed = whole if grad_normed is None else whole + grad_normed, None
    more = [latent, x_side, w_side, grad_normed, grad_latent, whole, ctx.sum_dtype]
    while more and more[-1] is None:
        more.pop()
    dx, dw, db, dn, du, dx_side, dw_side = down_norm_up_backward(
        grad_up, grad_rest, x, w_down, b_down, w_norm, w_up, rrms, ctx.start, ctx.size, *more
    )
    found = dict(zip(used, du, strict=False))
    d_up = [found.get(i) for i in range(ctx.ups)]
    gain = w_norm is not None and (used or grad_normed is not None)
    d_sides = (dx_side, dw_side) if x_side is not None else (None, None)
    grads = dx, dw, None if b_down is None else db, dn if gain else None, d_up, *(None,) * 4, *d_sides, *(None,) * 3
    return grads[: len(ctx.needs_input_grad)]  # one for every argument the caller gave, defaults not counted


down_norm_up.register_autograd(_backward, setup_context=_setup_context)


def _flops(x: Tensor, w_down: Tensor, b_down: Any, w_norm: Any, w_up: list[Tensor], *more: Any) -> float:
    sides = [w for w in more[5:6] if w is not None]
    return 2 * rows(x) * (elements(w_down) + sum(map(elements, (*w_up, *sides))))


def _backward_flops(
    grad_up: list[Tensor], _: Tensor, x: Tensor, w_down: Tensor, b_down: Any, w_norm: Any, w_up: list[Tensor],
    rrms: Tensor, start: int, size: int, latent: Tensor | None = None, *more: Any,
) -> float:  # fmt: skip
    sides = [w for w in more[1:2] if w is not None]
    gradients = 2 * (elements(w_down) + sum(map(elements, (*w_up, *sides))))
    again = 0 if latent is not None else size * hint(x.shape[-1])
    return 2 * rows(x) * (gradients + again)


declare(
    {
        "megacpp::down_norm_up": OpTraits(
            gemm=True,
            flops=_flops,
            # The latent, which begins backward's work otherwise; rrms tells the calls apart.
            handed_over=OptionalSavedOutput(
                "megacpp::down_norm_up_backward", flag=8, result=3, operand=10, witness=(2, 7)
            ),
        ),
        "megacpp::down_norm_up_backward": OpTraits(flops=_backward_flops),
    }
)
