"""Tensors on a GPU that one call makes and later calls read.

While CUDA graphs are warmed up or recorded, what their thread allocates lies in the graphs' own memory, which Inductor
hands out again: nothing but their results may stay there. Another thread's allocations do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megacpp_compile._torch.modes import in_own_thread
from megacpp_compile.lowerings._kernels.trace_options import ahead

Made = TypeVar("Made", bound=Callable[..., Any])
# Results that `remembered` keeps.
MOST = 256


def remembered(make: Made) -> Made:
    """`make`, whose last results are kept, but none while kernels are compiled ahead: its tensors hold no data."""
    keeping = functools.lru_cache(MOST)(make)

    @functools.wraps(make)
    def call(*args: Any) -> Any:
        return make(*args) if ahead() else keeping(*args)

    return call  # type: ignore[return-value]


def kept(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """`make()`, run by a thread and on a stream of its own, and ready. While a graph is recorded, when nothing may wait
    for the device, it is made in the graph; a call before that one makes it outside."""
    if torch.cuda.is_current_stream_capturing():
        return make()

    def run() -> Tensor:
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            made = make()
        stream.synchronize()
        return made

    return in_own_thread(run)


def kept_numbers(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` on the device, kept there as by `kept`."""
    if ahead():
        return torch.empty(len(numbers), dtype=dtype, device=device)
    made = torch.tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return made
    return kept(lambda: made.pin_memory().to(device, non_blocking=True), device)
