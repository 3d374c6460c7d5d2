"""`megacpp::sharded_logsumexp`: the log-sum-exp of logits of which each rank of a group has those of some words.

    logits   any shape and floating dtype: along `dim` the rank's words, from `first` on, of `words`
    dim      of the words, from 0; keepdim: whether the result has it, of size 1
    group    the name of the process group whose ranks have all words together
    returns  in the dtype of logits, the same on every rank

It is what `torch.logsumexp` makes of a DTensor that is sharded along `dim`, whose words no rank gathers here. Computed
in float32 (float64 for float64), in two all-reduces; only the forward communicates. The gradient of logits is that of
the rank's own words. Saved for backward: logits and the result in the dtype it is computed in.
Source: Megatron's vocabulary-parallel cross entropy, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype, no_autocast
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.linear_cross_entropy.ranks import joined


@torch.library.custom_op("megacpp::sharded_logsumexp", mutates_args=())
def _sharded_logsumexp(
    logits: Tensor, dim: int, keepdim: bool, first: int, words: int, group: str
) -> tuple[Tensor, Tensor]:
    with no_autocast(logits):
        own = torch.logsumexp(logits.to(compute_dtype(logits)), dim, keepdim)
        nothing = torch.zeros_like(own)
        lse = joined(own, nothing, nothing, group)[0]
        return lse.to(logits.dtype, copy=True), lse


@_sharded_logsumexp.register_fake
def _(logits, dim, keepdim, first, words, group):  # type: ignore[no-untyped-def]
    sizes = [1 if d == dim else n for d, n in enumerate(logits.shape) if keepdim or d != dim]
    return logits.new_empty(sizes), logits.new_empty(sizes, dtype=compute_dtype(logits))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, ctx.dim, ctx.keepdim, *_ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])


def _gradient(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 6
    logits, lse = ctx.saved_tensors
    if not ctx.keepdim:
        grad, lse = grad.unsqueeze(ctx.dim), lse.unsqueeze(ctx.dim)
    return (torch.exp(logits.to(lse.dtype) - lse) * grad).to(logits.dtype), *(None,) * 5


_sharded_logsumexp.register_autograd(_gradient, setup_context=_keep)
declare({"megacpp::sharded_logsumexp": OpTraits(recomputable=False)})
sharded_logsumexp = torch.ops.megacpp.sharded_logsumexp.default


def logsumexp_of_words(logits: Tensor, *settings: Any) -> Tensor:
    """The log-sum-exp that `sharded_logsumexp` returns."""
    lse: Tensor = sharded_logsumexp(logits, *settings)[0]
    return lse
