"""`megacpp::linear_cross_entropy`: the head's projection and its loss, of which no logits are kept.

    x                [n, h]  any floating dtype, any strides: a row a token
    w                [v, h]  x's dtype: a row a word
    b                [v] or None, x's dtype
    target           int64 [n]; a row whose target is `ignore_index` adds nothing to loss or gradients, whatever its
                     logits are and whatever multiplies them
    weight           [n] or None (1), in the compute dtype: what a row's loss counts for. It has no gradient
    label_smoothing  eps, from 0 to less than 1
    scale            multiplies logits
    softcap          None, or logits become softcap * tanh(logits / softcap), after `scale`
    z_loss           what lse^2 of a row adds to its loss, 0 for nothing
    reduction        "sum" or "none". A mean is a sum over a count that stands beside the op
    grads            which gradients the forward makes, of the letters of "xwb" in that order. With "none" it is ""
    first, words, group   where ranks hold a part of the words each (tensor parallelism): w and b have the words from
                     `first` on, of `words` in all, and the ranks of the process group `group` all of them together
    returns          loss, [] for "sum", [n] for "none", weighted and 0 where ignored; lse [n], log-sum-exp of every
                     row's final logits; dx [n, h], dw [v, h] and db [v], the sum's gradients in the dtypes of x and w
                     (dw and db of float16 in float32, as sums leave its range), of size 0 where `grads` does not name
                     them

    row loss         (1 - eps) (lse - logit of target) + eps (lse - mean of logits) + z_loss lse^2

Logits are a GEMM in x's dtype; what follows is computed in float32 (float64 for float64), loss and lse are in that
dtype, and the logits' gradient is rounded to x's dtype before its GEMMs. Raises OperandError for operands of other
shapes and dtypes; a target that is no word is an error where the lowering can tell, as in eager.

No tensor of n * v elements exists: logits are made for a chunk of tokens, and their gradient takes their place.
"sum": the forward makes gradients beside the loss, three GEMMs where eager has three, and backward multiplies them by
the loss's gradient; lse has no gradient. Saved for backward: dx, dw, db. A gradient that was not made is None. They are
gradients once: nothing is differentiated twice.
"none": the loss and lse of each row have gradients of their own, so backward makes the logits again, a fourth GEMM.
Saved for backward: the operands and lse.
With a group every rank is given the same x, target and weight, and returns the same loss and lse: ranks exchange four
numbers a row, in two all-reduces. dw and db are those of the rank's own words, and dx is the rank's share of a sum over
the group, which is for the graph to take (`megacpp::sum_gradient`). Only the forward communicates.
Source: https://arxiv.org/abs/2411.09009 and https://arxiv.org/abs/2410.10989 (gradients in the forward).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.errors import OperandError
from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._op import compute_dtype, define_op
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.linear_cross_entropy import reference
from megacpp_compile.lowerings.linear_cross_entropy._chunk_ops import gradients_like
from megacpp_compile.lowerings.linear_cross_entropy.chunks import kept_dtype, workspace
from megacpp_compile.lowerings.linear_cross_entropy.scaled import scaled_gradient

__all__ = ["GRADS", "PREFERENCE", "linear_cross_entropy", "linear_cross_entropy_backward"]

PREFERENCE = {"cuda": ("cuda_triton", "cuda_triton_ranks", "reference")}
GRADS = ("", "x", "w", "b", "xw", "xb", "wb", "xwb")


def _check(
    x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, weight: Tensor | None, label_smoothing: float,
    softcap: float | None, reduction: str, grads: str, first: int, words: int | None, group: str | None,
) -> str | None:  # fmt: skip
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        return f"x is {tuple(x.shape)}, w {tuple(w.shape)}, not [n, h] and [v, h]"
    if not x.is_floating_point() or x.dtype.itemsize < 2 or w.dtype != x.dtype:
        return f"x is {x.dtype}, w {w.dtype}: both are one of float64, float32, bfloat16, float16"
    if b is not None and (b.dtype != x.dtype or b.dim() != 1 or b.shape[0] != w.shape[0]):
        return f"b is {b.dtype} {tuple(b.shape)}, not {x.dtype} [v], v = {w.shape[0]}"
    if target.dtype != torch.int64 or target.dim() != 1 or target.shape[0] != x.shape[0]:
        return f"target is {target.dtype} {tuple(target.shape)}, not int64 [n], n = {x.shape[0]}"
    if weight is not None and (weight.dtype not in (torch.float32, compute_dtype(x)) or weight.dim() != 1):
        return f"weight is {weight.dtype} {tuple(weight.shape)}, not {compute_dtype(x)} [n], n = {x.shape[0]}"
    if weight is not None and weight.shape[0] != x.shape[0]:
        return f"weight has {weight.shape[0]} rows, x {x.shape[0]}"
    if w.shape[0] == 0:
        return "w has no word to choose from"
    if not 0 <= label_smoothing < 1:
        return f"label_smoothing is {label_smoothing}, not from 0 to less than 1"
    if softcap is not None and softcap <= 0:
        return f"softcap is {softcap}: a positive number, or None for none"
    if reduction not in ("sum", "none"):
        return f"reduction is {reduction!r}: 'sum' or 'none'; divide the sum for a mean"
    if grads not in GRADS:
        return f"grads is {grads!r}: letters of 'xwb' in that order"
    if grads and reduction == "none":
        return f"grads is {grads!r} with reduction 'none', whose gradients backward makes: ''"
    if "b" in grads and b is None:
        return f"grads is {grads!r}, and there is no b"
    if (words is None) != (group is None) or words is None and first:
        return f"first is {first}, words {words}, group {group!r}: all of them, or none"
    if words is not None and not 0 <= first <= words - w.shape[0]:
        return f"w has the {w.shape[0]} words from {first} on, of {words} in all"
    return None


@define_op(reference.linear_cross_entropy, check=_check, served=True)
def linear_cross_entropy(  # type: ignore[no-untyped-def]
    x, w, b, target, weight, ignore_index, label_smoothing, scale, softcap, z_loss, reduction, grads, *part
):
    wide = compute_dtype(x)
    kept = kept_dtype(w.dtype)
    loss = x.new_empty(() if reduction == "sum" else x.shape[:1], dtype=wide)
    return loss, x.new_empty(x.shape[:1], dtype=wide), *gradients_like(x, w, grads, kept, kept)


@define_op(reference.linear_cross_entropy_backward, served=True)
def linear_cross_entropy_backward(  # type: ignore[no-untyped-def]
    dloss, dlse, x, w, b, target, weight, lse, ignore_index, label_smoothing, scale, softcap, z_loss, grads, *part
):
    return gradients_like(x, w, grads, w.dtype, w.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ignore_index, label_smoothing, scale, softcap, z_loss, reduction, ctx.grads = inputs[:12]
    ctx.part = () if inputs[14] is None else inputs[12:]  # not every lowering knows of parts of the words
    ctx.settings = ignore_index, label_smoothing, scale, softcap, z_loss
    _, lse, *made = output
    ctx.set_materialize_grads(False)  # a loss or an lse that nobody reads has no gradient
    ctx.summed, ctx.dtype = reduction == "sum", inputs[1].dtype
    if ctx.summed:
        ctx.mark_non_differentiable(lse, *made)
        ctx.save_for_backward(*(t for t, name in zip(made, "xwb", strict=True) if name in ctx.grads))
    else:
        ctx.mark_non_differentiable(*made)
        ctx.save_for_backward(*tensors, lse)


def _backward(ctx: Any, dloss: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    dx, dw, db = _of_sum(ctx, dloss) if ctx.summed else _of_rows(ctx, dloss, dlse)
    return (dx, dw, db, *[None] * 12)[: len(ctx.needs_input_grad)]  # defaults that the caller left out do not count


def _of_sum(ctx: Any, dloss: Tensor | None) -> list[Tensor | None]:
    if dloss is None:
        return [None] * 3
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        problem = "a sum's gradients are made in its forward and have none of their own (create_graph=True)"
        raise OperandError("megacpp::linear_cross_entropy", problem)
    scaled = {name: scaled_gradient(t, dloss, ctx.dtype) for name, t in zip(ctx.grads, ctx.saved_tensors, strict=True)}
    return [scaled.get(name) for name in "xwb"]


def _of_rows(ctx: Any, dloss: Tensor | None, dlse: Tensor | None) -> list[Tensor | None]:
    x, w, b, target, weight, lse = ctx.saved_tensors
    grads = "".join(name for name, needed in zip("xwb", ctx.needs_input_grad, strict=False) if needed)
    if not grads or dloss is None and dlse is None:
        return [None] * 3
    made = linear_cross_entropy_backward(dloss, dlse, x, w, b, target, weight, lse, *ctx.settings, grads, *ctx.part)
    return [t if name in grads else None for t, name in zip(made, "xwb", strict=True)]


linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


_GRADS = 9  # where that argument is among those behind w


def _gemms(x: Tensor, w: Tensor, grads: str) -> float:
    """The logits, and a GEMM for each gradient but the bias's, which is a sum."""
    return 2 * elements(w) * hint(x.shape[0]) * (1 + len(grads.replace("b", "")))


def _flops(x: Tensor, w: Tensor, *rest: Any) -> float:
    return _gemms(x, w, rest[_GRADS])


def _flops_backward(dloss: Any, dlse: Any, x: Tensor, w: Tensor, *rest: Any) -> float:
    return _gemms(x, w, rest[_GRADS])


def _workspace(x: Tensor, w: Tensor, *rest: Any) -> int:
    return workspace(x, w, rest[_GRADS], kept_dtype(w.dtype))


def _workspace_backward(dloss: Any, dlse: Any, x: Tensor, w: Tensor, *rest: Any) -> int:
    return workspace(x, w, rest[_GRADS], w.dtype)


declare(
    {
        # Never recomputed: what it saves is smaller than its operand's logits, and gradients are three GEMMs.
        "megacpp::linear_cross_entropy": OpTraits(gemm=True, recomputable=False, flops=_flops, workspace=_workspace),
        "megacpp::linear_cross_entropy_backward": OpTraits(
            gemm=True, flops=_flops_backward, workspace=_workspace_backward
        ),
    }
)
