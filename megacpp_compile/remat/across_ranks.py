"""What every rank of a process group has to decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from megacpp_compile._torch.dispatch import disable_current_modes
from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.report.measure import allocated

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


def allocated_under(policy: CheckpointingPolicy | None, example_inputs: Sequence[Any]) -> int:
    """Bytes that are allocated on the device of a frame where `policy` limits the peak: on the rank that has most where
    it says so, which every rank has to ask as often as the others."""
    if policy is None or policy.peak_gib is None:
        return 0
    on = next((x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"), "cpu")
    given = allocated(on)
    return max(of_ranks(given, default_group())) if policy.same_on_ranks else given
