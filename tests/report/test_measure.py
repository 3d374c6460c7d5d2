"""`report.measure`: what a step allocates beyond what was there before it, on any device."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.errors import DeviceNotMeasuredError
from megacpp_compile.report.measure import allocated, at_peak
from megacpp_compile.report.report import Report


def step():
    first = torch.empty(1000)
    second = torch.empty(500)
    del first
    return torch.empty(900) + second[0]


def test_what_was_there_before_is_not_counted():
    """Parameters and optimizer state stay, and what of them the step frees is no credit to it."""
    own = at_peak(step, "cpu")
    assert own == {"before": None, "step": 4 * 500 + 2 * 4 * 900, "peak": None}
    there = [torch.empty(10_000)]
    assert at_peak(step, "cpu") == own

    def freeing():
        there.clear()
        return step()

    assert at_peak(freeing, "cpu")["step"] <= own["step"]
    assert allocated("cpu") == 0


def test_on_cuda_it_is_the_same_quantity(monkeypatch):
    """The allocator counts all there is: what was there before is taken off."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 250)
    report = Report()
    assert report.measure(lambda: None, "cuda") == 150
    assert report.measured == {"before": 100, "step": 150, "peak": 250}


def test_other_devices_are_an_error():
    """Their tensors are not in main memory, and its figure would be of something else."""
    with pytest.raises(DeviceNotMeasuredError, match="'xla'"):
        Report().measure(step, "xla")
