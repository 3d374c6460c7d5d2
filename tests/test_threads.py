"""Several threads: the first use of the backend at once, and whose report a compilation goes to."""

from __future__ import annotations

import contextlib
import contextvars
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_compile import record
from megacpp_compile.report import collector
from megacpp_compile.report.records import CompiledRegion, Frame
from megacpp_compile.report.report import Report

FIRST_USE = """
import threading
from concurrent.futures import ThreadPoolExecutor
import torch, torch._inductor.compile_fx as inductor
from torch import nn
from torch._dynamo.backends import registry

inductor.compile_fx = lambda gm, inputs, **_: gm.forward  # what is asked here is not how kernels are made
together = threading.Barrier(3, timeout=120)
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
    together.wait()
    own = torch.compile(model, backend="megacpp", options={"require": {"down_norm_up": 1}})
    own(x).sum().backward()
    torch.testing.assert_close(own(x), model(x))

with ThreadPoolExecutor(3) as pool:
    for done in [pool.submit(work) for _ in range(3)]:
        done.result()
assert "megacpp" in torch.compiler.list_backends()
"""


@pytest.mark.end_to_end
def test_first_use_from_three_threads_at_once():
    """Each of them finds the entry point loaded and the backend not yet registered."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@contextlib.contextmanager
def meanwhile(work: Callable[..., Any], *args: Any) -> Iterator[None]:
    with ThreadPoolExecutor() as pool:
        done = pool.submit(work, *args)
        yield
    done.result()


def in_thread(work: Callable[..., Any], *args: Any) -> None:
    with meanwhile(work, *args):
        pass


@pytest.mark.usefixtures("eager_backend")
def test_two_threads_record_their_own_frames():
    torch._dynamo.reset()
    opened, compiled = threading.Barrier(2), threading.Barrier(2)
    reports: dict[str, Report] = {}

    def work(name: str, between: nn.Module) -> None:
        model = nn.Sequential(nn.Linear(8, 6), between, nn.Linear(6, 8, bias=False))
        with record() as reports[name]:
            opened.wait(60)
            torch.compile(model, backend="megacpp")(torch.randn(3, 8))
            compiled.wait(60)

    with meanwhile(work, "plain", nn.Tanh()):
        work("down", nn.RMSNorm(6))
    assert {name: len(report.frames) for name, report in reports.items()} == {"down": 1, "plain": 1}
    assert {name: report.counts["down_norm_up"] for name, report in reports.items()} == {"down": 1, "plain": 0}


def emit(name: str) -> None:
    collector.emit_frame(Frame(name=name))


def names(report: Report) -> list[str]:
    return [frame.name for frame in report.frames]


def test_a_thread_without_a_record_reports_to_every_open_one():
    """A pool's worker, or autograd's own thread."""
    with record() as outer, record() as inner:
        in_thread(emit, "worker")
    assert names(outer) == names(inner) == ["worker"]
    in_thread(emit, "late")
    assert names(outer) == ["worker"]


def test_a_thread_with_a_record_reports_there_alone():
    def work() -> None:
        with record() as own:
            emit("own")
            collector.emit_regions([CompiledRegion(("a",), "A", 1, "compiled")])
            collector.emit_estimate({"peak": 1})
            assert collector.active()
        assert names(own) == ["own"] and own.regions and own.estimate == {"peak": 1}

    with record() as outer:
        in_thread(work)
        emit("mine")
    assert names(outer) == ["mine"] and not outer.regions and outer.estimate is None


def test_a_trial_in_one_thread_takes_no_frame_of_another():
    with record() as outer:
        with collector.aside() as trial:
            emit("trial")
            in_thread(emit, "elsewhere")
        emit("after")
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
        aside = collector.aside()
        aside.__enter__()
        with meanwhile(work):
            assert began.wait(60)
            aside.__exit__(None, None, None)
            ended.set()
        emit("after")
    assert names(report) == ["after"]
    assert not collector.active()


def test_a_context_that_outlives_its_record_reports_to_it_no_more():
    with record() as report:
        context = contextvars.copy_context()
        context.run(emit, "inside")
    context.run(emit, "outside")
    assert names(report) == ["inside"]
