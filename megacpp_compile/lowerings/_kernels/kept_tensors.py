"""Tensors on a GPU that one call makes and later calls read.

While CUDA graphs are warmed up or recorded, what their thread allocates lies in the graphs' own memory, which Inductor
hands out again: nothing but their results may stay there. Another thread's allocations do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


def kept(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """`make()`, run by a thread and on a stream of its own, and ready. While a graph is recorded, when nothing may wait
    for the device, it is made in the graph; a call before that one makes it outside."""
    if torch.cuda.is_current_stream_capturing():
        return make()
    made = list[Tensor | BaseException]()

    def run() -> None:
        try:
            stream = torch.cuda.Stream(device)
            with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
                made.append(make())
            stream.synchronize()
        except BaseException as error:  # the caller's to see
            made.append(error)

    thread = threading.Thread(target=run, name="megacpp_kept")
    thread.start()
    thread.join()
    if isinstance(made[-1], BaseException):
        raise made[-1]
    return made[-1]
