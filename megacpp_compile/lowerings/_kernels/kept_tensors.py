"""Tensors on a GPU that one call makes and later calls read.

While CUDA graphs are warmed up or recorded, what their thread allocates lies in the graphs' own memory, which Inductor
hands out again: nothing but their results may stay there. Another thread's allocations do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megacpp_compile._torch.modes import in_own_thread


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
    made = torch.tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return made
    return kept(lambda: made.pin_memory().to(device, non_blocking=True), device)
