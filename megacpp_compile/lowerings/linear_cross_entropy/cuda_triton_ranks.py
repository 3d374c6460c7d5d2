"""`linear_cross_entropy` on CUDA where ranks share the words: the two sweeps of `_triton_rows` apart, with the ranks'
statistics joined between them.

A chunk's logits are made for its statistics; where they are the only chunk they stay for the gradient, else the GEMM
makes them again. Rows whose target another rank has find a logit of 0 here and no word to take the one off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.linear_cross_entropy import cuda_triton
from megacpp_compile.lowerings.linear_cross_entropy.chunks import kept_dtype
from megacpp_compile.lowerings.linear_cross_entropy.ranks import in_bounds, joined
from megacpp_compile.lowerings.linear_cross_entropy.reference import counts, places_of, reduced, row_losses

__all__ = ["TRACED", "linear_cross_entropy", "linear_cross_entropy_backward", "supports"]

# Loops over chunks, of which there may be any number, around what ranks exchange.
TRACED = False
_GROUP = {"linear_cross_entropy": 14, "linear_cross_entropy_backward": 16}
_SMOOTHING = {"linear_cross_entropy": 6, "linear_cross_entropy_backward": 9}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if len(args) <= _GROUP[name]:
        return "one-rank: cuda_triton serves words that one rank has"
    if args[_SMOOTHING[name]]:
        return "smoothing: the kernel counts the words of one rank"
    return cuda_triton.supports(name, args)


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    grads: str,
    first: int,
    words: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    at = places_of(target, ignore_index)
    in_bounds(at, words)
    of = cuda_triton.HeadChunks(x, w, b, at - first, grads)
    made = cuda_triton.HeadGradients(of, grads, kept_dtype(w.dtype))
    count = counts(target, weight, ignore_index, compute_dtype(x))
    lse, picked = (torch.empty_like(count) for _ in range(2))
    vectors = {"target": of.target, "count": count, "dlse": count, "lse": lse, "picked": picked, "total": lse}
    constants = cuda_triton.constants(x, 0.0, scale, softcap or 0.0, z_loss) | {"DLSE": False}
    kept = []
    for rows, chunk in of.logits():
        cuda_triton.walk_chunks([(rows, chunk)], made, vectors, constants | {"STATISTICS": True, "GRADIENT": False})
        kept = [(rows, chunk)]
    lse, picked, _ = joined(lse, picked, torch.zeros_like(lse), group)
    if grads:
        again = kept if len(of.slices) == 1 else of.logits()
        vectors |= {"lse": lse, "picked": picked, "total": lse}
        cuda_triton.walk_chunks(again, made, vectors, constants | {"STATISTICS": False, "GRADIENT": True})
    loss = row_losses(lse, picked, lse, words, 0.0, z_loss)
    dx, dw, db = made.made()
    return reduced(loss, count, reduction), lse, dx, dw, db.to(dw.dtype)


def linear_cross_entropy_backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float | None,
    z_loss: float,
    grads: str,
    first: int,
    words: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    count = counts(target, weight, ignore_index, lse.dtype)  # 0 where the target is none, which `first` would shift
    at = places_of(target, ignore_index) - first
    if weight is None:
        weight = torch.ones_like(count)
    own = torch.where(count == 0, 0, weight.to(lse.dtype))
    args = dloss, dlse, x, w, b, at, own, lse, -1 - words, 0.0, scale, softcap, z_loss, grads
    return cuda_triton.linear_cross_entropy_backward(*args)
