"""`megacpp::norm_linear`: RMSNorm, then the projection(s) that are its only readers.

    x          [..., d]          w_norm [d] or None
    w          list of [n_i, d]  b      list of [n_i], one for every w, or empty
    returns    y: list of [..., n_i] in the dtype of w_i;  rrms [..., 1], the per-token reciprocal root mean square

The norm is computed in float32 (float64 for float64) and rounded once, to the dtype of w, which all w and b share.
Saved for backward: x, the weights, rrms. Backward recomputes the normed x from them, without a GEMM.
Source: RMSNorm, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.fx.sizes import elements, rows
from megacpp_compile.lowerings._op import compute_dtype, define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.norm_linear import reference

REFERENCE_SERVES = {"tpu": "a norm in front of a GEMM, which XLA fuses into the GEMM's operand"}


@define_op(reference.norm_linear)
def norm_linear(x, w_norm, w, b, eps):  # type: ignore[no-untyped-def]
    outer = x.shape[:-1]
    y = [x.new_empty((*outer, one.shape[0]), dtype=one.dtype) for one in w]
    return y, x.new_empty((*outer, 1), dtype=compute_dtype(x.dtype))


@define_op(reference.norm_linear_backward)
def norm_linear_backward(grad, x, w_norm, w, rrms, biased):  # type: ignore[no-untyped-def]
    d_norm = rrms.new_empty(0) if w_norm is None else w_norm.new_empty(w_norm.shape)
    d_b = [one.new_empty(one.shape[0]) for one in w] if biased else []
    return x.new_empty(x.shape), d_norm, [one.new_empty(one.shape) for one in w], d_b


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, w_norm, w, b, _ = inputs
    _, rrms = output
    ctx.mark_non_differentiable(rrms)
    ctx.set_materialize_grads(False)
    ctx.biased = bool(b)
    ctx.save_for_backward(x, rrms, w_norm, *w)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    x, rrms, w_norm, *w = ctx.saved_tensors
    # A projection that no loss depends on has no gradient, as in eager.
    used = [i for i, g in enumerate(grad) if g is not None]
    d_x, d_norm, d_w, d_b = norm_linear_backward(
        [grad[i] for i in used], x, w_norm, [w[i] for i in used], rrms, ctx.biased
    )
    d_w, d_b = (_spread(d, used, len(w)) if d else d for d in (d_w, d_b))
    return d_x, None if w_norm is None else d_norm, d_w, d_b, None


def _spread(found: list[Tensor], at: list[int], count: int) -> list[Tensor | None]:
    """A list of `count` with `found` at positions `at`, None elsewhere."""
    by_place = dict(zip(at, found, strict=True))
    return [by_place.get(i) for i in range(count)]


norm_linear.register_autograd(_backward, setup_context=_setup_context)



def _flops(x: Tensor, w_norm: Any, w: list[Tensor], *_: Any) -> float:
    return 2 * rows(x) * sum(map(elements, w))


declare({"megacpp::norm_linear": OpTraits(gemm=True, flops=_flops), "megacpp::norm_linear_backward": OpTraits()})
