"""What every rank of a process group has to decide alike."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from megacpp_compile._torch.dispatch import disable_current_modes

T = TypeVar("T")


def of_ranks(own: T, group: Any) -> list[T]:
    """What each rank of `group` found, in their order; None: this rank alone. Every rank has to call it."""
    if group is None:
        return [own]
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    with disable_current_modes():  # a frame's fake tensors carry nothing from rank to rank
        torch.distributed.all_gather_object(every, own, group)
    return every


def default_group() -> Any:
    """The default process group; None where there is none."""
    distributed = torch.distributed
    return distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None
