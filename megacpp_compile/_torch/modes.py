"""Torch's global modes around code that runs a graph's own switches: whatever happens in between, none stays on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from megacpp_compile._torch import autocast, functorch

Result = TypeVar("Result")


def in_own_thread(run: Callable[[], Result]) -> Result:
    """`run()`, or what it raises, by a thread that has neither this one's modes, nor its count of autograd's nodes, nor
    the pool that its allocations go to while CUDA graphs are warmed up."""
    with ThreadPoolExecutor(1, "megacpp") as alone:
        return alone.submit(run).result()


def autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    """(kind, whether autocast is on, its dtype) of each kind of device that has it."""
    kinds = autocast.supported_devices()
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Grad mode, functorch's stack and autocast are afterwards what they were before, also after an error."""
    layers, grad = functorch.layers(), torch.is_grad_enabled()
    switched = autocast_state()
    cache, depth = torch.is_autocast_cache_enabled(), _autocast_depth()
    try:
        yield
    finally:
        if functorch.layers() > layers:
            functorch.undo_to_layer(layers)
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in switched:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
        # A depth left too high would keep eager's cache of cast weights for good, past every optimizer step.
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    """How many autocast regions are open; torch only tells while changing it."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
