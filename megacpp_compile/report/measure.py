"""Measures the memory of a training step, to stand beside the predicted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacpp_compile.errors import DeviceNotMeasuredError


def at_peak(step: Callable[[], Any], device: str | torch.device) -> dict[str, int | None]:
    """Bytes allocated at the peak of `step()`: "before", "step" and "peak", as in `Report.measured`.

    On CUDA by the caching allocator; call the step once before, as compiling and tuning allocate too. On CPU by torch's
    profiler, which sees changes alone. Raises DeviceNotMeasuredError for other devices.
    """
    if measured_kind(device) == "cpu":
        return {"before": None, "step": _on_cpu(step), "peak": None}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return {"before": before, "step": peak - before, "peak": peak}


def measured_kind(device: str | torch.device) -> str:
    """"cuda" or "cpu". Raises DeviceNotMeasuredError for other devices."""
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        raise DeviceNotMeasuredError(str(device))
    return kind


def _on_cpu(step: Callable[[], Any]) -> int:
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
