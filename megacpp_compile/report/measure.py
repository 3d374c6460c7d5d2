"""Measures the peak memory of a training step, to stand beside the predicted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(step: Callable[[], Any], device: str | torch.device) -> int:
    """Bytes allocated on `device` at the peak of `step()`.

    On CUDA all that the caching allocator has handed out there, before the step as well; call the step once before, as
    compiling and tuning allocate too. Elsewhere what the step allocates in main memory beyond what was there, by
    torch's profiler.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        now += change.nbytes()
        top = max(top, now)
    return top


def allocated(device: str | torch.device) -> int:
    """Bytes allocated on a CUDA device now; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else 0
