"""Several threads: the first use of the backend at once, and whose report a compilation goes to."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_compile import record
from megacpp_compile.report import collector
from megacpp_compile.report.records import CompiledRegion, Frame
from megacpp_compile.report.report import Report

FIRST_USE = """
import sys, threading
import torch, torch._inductor.compile_fx as inductor
from torch import nn
from torch._dynamo.backends import registry

inductor.compile_fx = lambda gm, inputs, **_: gm.forward  # what is asked here is not how kernels are made
together, compiled, errors = threading.Barrier(3, timeout=120), [], []
registry._lazy_import()
entry_point = registry._BACKENDS["megacpp"]

class Meeting:
    def load(self):  # all three import the backend, and none registers it before the last one has
        loaded = entry_point.load()
        together.wait()
        return loaded

registry._BACKENDS["megacpp"] = Meeting()

def work():
    model = nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False))
    x = torch.randn(3, 8)
    try:
        together.wait()
        own = torch.compile(model, backend="megacpp", options={"require": {"down_norm_up": 1}})
        own(x).sum().backward()
        torch.testing.assert_close(own(x), model(x))
        compiled.append(own)
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert len(compiled) == 3 and "megacpp" in torch.compiler.list_backends()
"""


def test_first_use_from_three_threads_at_once():
    """Each of them finds the entry point loaded and the backend not yet registered."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def in_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 8, bias=False)

    def forward(self, x):
        return self.up(self.norm(self.down(x)))


@pytest.mark.usefixtures("eager_backend")
def test_two_threads_record_their_own_frames():
    """A record of each thread is open while both compile."""
    torch._dynamo.reset()
    opened, compiled = threading.Barrier(2), threading.Barrier(2)
    reports: dict[str, Report] = {}

    def work(name: str, model: nn.Module) -> None:
        with record() as reports[name]:
            opened.wait(60)
            torch.compile(model, backend="megacpp")(torch.randn(3, 8))
            compiled.wait(60)

    other = threading.Thread(target=work, args=("plain", nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))))
    other.start()
    work("down", Down())
    other.join()
    assert {name: len(report.frames) for name, report in reports.items()} == {"down": 1, "plain": 1}
    assert reports["down"].counts["down_norm_up"] == 1
    assert reports["plain"].counts["down_norm_up"] == 0


def names(report: Report) -> list[str]:
    return [frame.name for frame in report.frames]


def test_a_thread_without_a_record_reports_to_every_open_one():
    """A pool's worker, or autograd's own thread."""
    with record() as outer, record() as inner:
        in_thread(lambda: collector.emit_frame(Frame(name="worker")))
    assert names(outer) == names(inner) == ["worker"]
    in_thread(lambda: collector.emit_frame(Frame(name="late")))
    assert names(outer) == ["worker"]


def test_a_thread_with_a_record_reports_there_alone():
    def work() -> None:
        with record() as own:
            collector.emit_frame(Frame(name="own"))
            collector.emit_regions([CompiledRegion(("a",), "A", 1, "compiled")])
            collector.emit_estimate({"peak": 1})
            assert collector.active()
        assert names(own) == ["own"] and own.regions and own.estimate == {"peak": 1}

    with record() as outer:
        in_thread(work)
        collector.emit_frame(Frame(name="mine"))
    assert names(outer) == ["mine"] and not outer.regions and outer.estimate is None


def test_a_trial_in_one_thread_takes_no_frame_of_another():
    with record() as outer:
        with collector.aside() as trial:
            collector.emit_frame(Frame(name="trial"))
            in_thread(lambda: collector.emit_frame(Frame(name="elsewhere")))
        collector.emit_frame(Frame(name="after"))
    assert names(trial) == ["trial"]
    assert names(outer) == ["elsewhere", "after"]


def test_trials_of_two_threads_end_in_any_order():
    """The first to begin is the first to end; what was open before them is open after them."""
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        with collector.aside():
            began.set()
            assert ended.wait(60)

    with record() as report:
        with collector.aside():
            other = threading.Thread(target=work)
            other.start()
            assert began.wait(60)
        ended.set()
        other.join()
        collector.emit_frame(Frame(name="after"))
    assert names(report) == ["after"]
    assert not collector.active()


def test_a_context_that_outlives_its_record_reports_to_it_no_more():
    import contextvars

    with record() as report:
        context = contextvars.copy_context()
        context.run(collector.emit_frame, Frame(name="inside"))
    context.run(collector.emit_frame, Frame(name="outside"))
    assert names(report) == ["inside"]
