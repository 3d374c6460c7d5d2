"""Tensors on a GPU that one call makes and later calls read.

While CUDA graphs are warmed up or recorded, what their thread allocates lies in the graphs' own memory, which Inductor
hands out again: nothing but their results may stay there. Another thread's allocations do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.trace_options import ahead

# Tables that `table` keeps.
MOST = 256
_tables: dict[Any, Tensor] = {}


def kept(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """`make()`, run by a thread and on a stream of their own, and ready. While a graph is recorded, when nothing
    may wait for the device, it is made in the graph; a call before that one makes it outside."""
    if torch.cuda.is_current_stream_capturing():
        return make()

    def run() -> Tensor:
        stream = _stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            made = make()
        stream.synchronize()
        return made

    return _thread().submit(run).result()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """Kept, as a thread's first call of CUDA takes it a millisecond."""
    return ThreadPoolExecutor(1, "megacpp-kept")


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def table(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` on the device. So many different ones are kept there, as by `kept`. Where they are others in each step,
    as addresses are that FSDP gathers weights to, those that come later are for what this stream does next alone, and
    nothing waits for them."""
    if ahead():  # nothing that holds no data may be found by a real call
        return torch.empty(len(numbers), dtype=dtype, device=device)
    key = numbers, dtype, device
    if (there := _tables.get(key)) is not None:
        return there
    made = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return made.pin_memory().to(device, non_blocking=True)
    if len(_tables) >= MOST:
        return made.to(device, non_blocking=True)
    _tables[key] = there = kept(lambda: made.to(device), device) if device.type == "cuda" else made
    return there
