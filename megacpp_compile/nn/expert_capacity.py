"""A capacity for routed experts: no expert takes more slots than its share, and dropped slots are counted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megacpp_compile.errors import OperandError
from megacpp_compile.targets import by_xla


def equal_split(
    indices: Tensor, experts: int, factor: float = 1.0, capacity: int | None = None
) -> tuple[Tensor, Tensor]:
    """The choices of a router with those beyond an expert's capacity taken out: (kept, dropped).

    Plain PyTorch of static shapes, for a model to call between its top-k and its experts, on every target. Without it
    nothing is dropped anywhere: `megacpp::moe` is exact. All tokens' first choices are served before any second one,
    and within a choice earlier tokens before later ones.

    Args:
        indices: [..., k] int32 or int64, the experts of each token, from 0 on; -1 is no expert and takes no slot.
        experts: how many there are.
        factor: of the equal share: a capacity of `ceil(factor * slots / experts)`.
        capacity: slots an expert takes at most, instead of `factor`.

    Returns:
        kept: `indices` with -1 where a slot was dropped, of the same shape and dtype.
        dropped: [experts] int64, how many slots of each expert were dropped. Worth logging: their tokens get nothing.

    Raises OperandError for indices of another dtype, for experts, factor or capacity out of range, and on a CPU for an
    index that is neither an expert nor -1. In compiled code and on CUDA that is a RuntimeError when it runs, on CUDA at
    the next synchronisation; XLA does not check it.
    Source: GShard, https://arxiv.org/abs/2006.16668, algorithm 1, without its random second choice.
    """
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() == 0:
        raise OperandError("equal_split", f"indices are {indices.dtype} {tuple(indices.shape)}, not int [..., k]")
    if experts < 1 or (factor <= 0 if capacity is None else capacity < 0):
        raise OperandError("equal_split", f"{experts} experts, factor {factor}, capacity {capacity}")
    _check_experts(indices, experts)
    if capacity is None:
        capacity = math.ceil(factor * indices.numel() / experts)
    by_choice = indices.reshape(-1, indices.shape[-1] if indices.dim() > 1 else 1).t()
    taken = by_choice.reshape(-1, 1) == torch.arange(experts, device=indices.device)
    place = torch.where(taken, taken.cumsum(0), 0).sum(1)  # from 1 on
    fits = (place <= capacity).view(by_choice.shape).t().reshape(indices.shape)
    return torch.where(fits, indices, -1), (taken.sum(0) - capacity).clamp(min=0)


def _check_experts(indices: Tensor, experts: int) -> None:
    """Raise for an index that is neither an expert nor -1; on a GPU the device does, so that the host need not wait."""
    if by_xla(indices.device):
        return
    known = (indices >= -1) & (indices < experts)
    here = indices.device.type == "cpu" and type(indices) is Tensor  # neither fake nor a wrapper
    if here and not torch.compiler.is_compiling() and not known.all():
        odd = indices[~known][0].item()
        raise OperandError("equal_split", f"indices hold {odd}, where experts are 0 to {experts - 1} and -1 is none")
    torch._assert_async(known.all(), f"equal_split: an index is neither an expert from 0 to {experts - 1} nor -1")
