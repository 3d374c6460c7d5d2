"""`report.observe`: which attention kernels ran, beside those that frames were compiled to; `report.measure`: what a
step allocates beyond what was there before it, on any device."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.errors import DeviceNotMeasuredError
from megacpp_compile.report.measure import allocated, at_peak
from megacpp_compile.report.report import Report


class Attends(nn.Module):
    def __init__(self, plain=False):
        super().__init__()
        self.qkv, self.plain = nn.Linear(32, 96), plain

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if self.plain:
            return (q @ k.mT).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v)


@pytest.fixture
def compiled(no_kernels):
    """(a step of a compiled model that ran once, the report of it)."""
    torch._dynamo.reset()
    model, x = torch.compile(Attends(), backend="megacpp"), torch.randn(1, 8, 32)

    def step():
        model(x).sum().backward()

    with megacpp_compile.record() as report:
        step()
    return step, report


def test_a_row_has_what_ran(compiled):
    step, report = compiled
    (row,) = report.frames[0].attention
    assert (row["kernel"], row["observed"]) == ("flash", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.observe(step, "cpu") == ("flash",)
    assert row["observed"] == "flash"
    again = type(report).from_json(report.to_json())
    assert again.frames[0].attention == report.frames[0].attention


def test_another_kernel_than_promised_is_told_and_other_devices_are_an_error(compiled):
    step, report = compiled
    (row,) = report.frames[0].attention
    row["kernel"], row["fqn"] = "cudnn", "layers.0"
    with pytest.warns(UserWarning, match="layers.0: attention was compiled to cudnn, and in this step flash ran"):
        report.observe(step, "cpu")
    assert row["observed"] == "flash"
    with pytest.warns(UserWarning, match="no kernel of attention that is known ran"):
        report.observe(lambda: None, "cpu")
    assert row["observed"] == "?"
    with pytest.raises(DeviceNotMeasuredError, match="xla"):
        compiled[1].observe(compiled[0], "xla:0")


def test_of_several_that_ran_a_row_has_its_own(compiled):
    step, report = compiled
    report.frames[0].attention.append(dict(report.frames[0].attention[0], kernel="?"))

    def both():
        step()
        torch.ops.aten._scaled_dot_product_attention_math(*torch.randn(3, 1, 2, 8, 16))
        Attends(plain=True)(torch.randn(1, 8, 32))

    assert report.observe(both, "cpu") == ("flash",)  # a softmax beside it is anybody's
    assert [row["observed"] for row in report.frames[0].attention] == ["flash", "flash"]
    assert report.observe(lambda: Attends(plain=True)(torch.randn(1, 8, 32)), "cpu") == ("unfused",)


def allocating():
    first, second = torch.empty(1000), torch.empty(500)
    del first
    return torch.empty(900) + second[0]


def test_what_was_there_before_is_not_counted():
    """Parameters and optimizer state stay, and what of them the step frees is no credit to it."""
    own = at_peak(allocating, "cpu")
    assert own == {"before": None, "step": 4 * 500 + 2 * 4 * 900, "peak": None}
    there = [torch.empty(10_000)]
    assert at_peak(allocating, "cpu") == own

    def freeing():
        there.clear()
        return allocating()

    assert at_peak(freeing, "cpu")["step"] <= own["step"] and allocated("cpu") == 0


def test_on_cuda_it_is_the_same_quantity_and_elsewhere_an_error(monkeypatch):
    """The allocator counts all there is: what was there before is taken off."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 250)
    report = Report()
    assert report.measure(lambda: None, "cuda") == 150
    assert report.measured == {"before": 100, "step": 150, "peak": 250}
    # Their tensors are not in main memory, and its figure would be of something else.
    with pytest.raises(DeviceNotMeasuredError, match="'xla'"):
        Report().measure(allocating, "xla")
