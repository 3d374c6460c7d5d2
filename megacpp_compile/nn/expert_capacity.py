"""A capacity for routed experts: no expert takes more slots than its share, and dropped slots are counted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megacpp_compile.errors import OperandError


def equal_split(
    indices: Tensor, experts: int, factor: float = 1.0, capacity: int | None = None
) -> tuple[Tensor, Tensor]:
    """The choices of a router with those beyond an expert's capacity taken out: (kept, dropped).

    Plain PyTorch of static shapes, for a model to call between its top-k and its experts, on every target. Without it
    nothing is dropped anywhere: `megacpp::moe` is exact. All tokens' first choices are served before any second one,
    and within a choice earlier tokens before later ones.

    Args:
        indices: [..., k] int32 or int64, the experts of each token; an index that is no expert (-1) takes no slot.
        experts: how many there are.
        factor: of the equal share: a capacity of `ceil(factor * slots / experts)`.
        capacity: slots an expert takes at most, instead of `factor`.

    Returns:
        kept: `indices` with -1 where a slot was dropped, of the same shape and dtype.
        dropped: [experts] int64, how many slots of each expert were dropped. Worth logging: their tokens get nothing.

    Raises OperandError for indices of another dtype, and for experts, factor or capacity out of range.
    Source: GShard, https://arxiv.org/abs/2006.16668, algorithm 1, without its random second choice.
    """
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() == 0:
        raise OperandError("equal_split", f"indices are {indices.dtype} {tuple(indices.shape)}, not int [..., k]")
    if experts < 1 or (factor <= 0 if capacity is None else capacity < 0):
        raise OperandError("equal_split", f"{experts} experts, factor {factor}, capacity {capacity}")
    if capacity is None:
        capacity = math.ceil(factor * indices.numel() / experts)
    by_choice = indices.reshape(-1, indices.shape[-1] if indices.dim() > 1 else 1).t()
    taken = by_choice.reshape(-1, 1) == torch.arange(experts, device=indices.device)
    place = torch.where(taken, taken.cumsum(0), 0).sum(1)  # from 1 on
    fits = (place <= capacity).view(by_choice.shape).t().reshape(indices.shape)
    return torch.where(fits, indices, -1), (taken.sum(0) - capacity).clamp(min=0)
