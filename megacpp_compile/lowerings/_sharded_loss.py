"""`megacpp::sharded_cross_entropy`: the cross entropy of logits of which each rank of a group has those of some words.

    logits           [n, v] or [n, v, ...] or [v], any floating dtype: the rank's words, from `first` on, of `words`
    target           int64 [n, ...] or []: any word, the same on every rank; `ignore_index` is none
    label_smoothing  from 0 to less than 1
    reduction        "none", "sum" or "mean", over rows that are not ignored
    group            the name of the process group whose ranks have all words together
    returns          loss, [] or like target, in the dtype of logits: the same on every rank; lse, float32 or better, of
                     every row's logits of all words

It is what `torch.distributed.tensor.parallel.loss_parallel` makes of `F.cross_entropy`, in two all-reduces; only the
forward communicates. The gradient of logits is that of the rank's own words. Saved for backward: logits, target, lse.
Source: Megatron's vocabulary-parallel cross entropy, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype, no_autocast
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.linear_cross_entropy.ranks import in_bounds, joined, statistics_of_words
from megacpp_compile.lowerings.linear_cross_entropy.reference import gradient, places_of, row_losses


@torch.library.custom_op("megacpp::sharded_cross_entropy", mutates_args=())
def _sharded_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str, first: int, words: int,
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with no_autocast(logits):
        at = places_of(target.flatten(), ignore_index)
        in_bounds(at, words)
        lse, picked, total = joined(*statistics_of_words(_rows(logits), at - first), group)
        loss = row_losses(lse, picked, total, words, label_smoothing, 0.0)
        loss = torch.where(target.flatten() == ignore_index, 0, loss)
        loss = loss.view(target.shape) if reduction == "none" else loss.sum()
        if reduction == "mean":
            loss = loss / (target != ignore_index).sum()
        return loss.to(logits.dtype), lse


@_sharded_cross_entropy.register_fake
def _(  # type: ignore[no-untyped-def]
    logits, target, ignore_index, label_smoothing, reduction, first, words, group
):
    lse = logits.new_empty((target.numel(),), dtype=compute_dtype(logits))
    return logits.new_empty(target.shape if reduction == "none" else ()), lse


@torch.library.custom_op("megacpp::sharded_cross_entropy_backward", mutates_args=())
def _sharded_cross_entropy_backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float,
    reduction: str, first: int, words: int,
) -> Tensor:  # fmt: skip
    flat = target.flatten()
    count = (flat != ignore_index).to(lse.dtype)
    if reduction == "mean":
        count = count / count.sum()
    count = count * dloss.to(lse.dtype).flatten()
    at = places_of(flat, ignore_index) - first
    d = gradient(_rows(logits), lse, at, count, None, label_smoothing, 1.0, None, 0.0, words).to(logits.dtype)
    dim = min(1, logits.dim() - 1)
    shape = logits.movedim(dim, -1).shape
    return d.view(shape).movedim(-1, dim).contiguous()


@_sharded_cross_entropy_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    dloss, logits, target, lse, ignore_index, label_smoothing, reduction, first, words
):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _rows(logits: Tensor) -> Tensor:
    """The logits as [rows, words], in the compute dtype."""
    wide = logits.movedim(min(1, logits.dim() - 1), -1).to(compute_dtype(logits))
    return wide.reshape(-1, wide.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.settings, _ = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, lse)


def _gradient(ctx: Any, dloss: Tensor | None, _: None) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 8
    backward = torch.ops.megacpp.sharded_cross_entropy_backward.default
    return backward(dloss, *ctx.saved_tensors, *ctx.settings), *(None,) * 7


_sharded_cross_entropy.register_autograd(_gradient, setup_context=_keep)
declare({"megacpp::sharded_cross_entropy": OpTraits(recomputable=False),
         "megacpp::sharded_cross_entropy_backward": OpTraits()})  # fmt: skip
sharded_cross_entropy = torch.ops.megacpp.sharded_cross_entropy.default


def loss_of_words(logits: Tensor, target: Tensor, *settings: Any) -> Tensor:
    """The loss that `sharded_cross_entropy` returns."""
    loss: Tensor = sharded_cross_entropy(logits, target, *settings)[0]
    return loss
