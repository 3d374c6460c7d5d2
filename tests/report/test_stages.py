"""Where the seconds of compiling a frame go."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import megacpp_compile
from benchmarks import models
from megacpp_compile.backends import automatic
from megacpp_compile.report import stages
from megacpp_compile.report.pieces import STAGES
from megacpp_compile.report.stages import stage, timed


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until the test moves it."""
    now = [0.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def test_a_stage_stops_while_one_inside_it_runs(clock):
    seconds = {}
    with timed(seconds, "torch"):
        clock(1)
        with stage("plan"):
            clock(2)
            with stage("torch"):
                clock(4)
            clock(8)
        clock(16)
        stage("plan")(clock)(32)
    assert seconds == {"torch": 21, "plan": 42}


def test_a_stage_that_fails_is_over(clock):
    seconds = {}
    with timed(seconds, "torch"):
        with pytest.raises(ZeroDivisionError), stage("code"):
            clock(1)
            raise ZeroDivisionError
        clock(2)
    assert seconds == {"code": 1, "torch": 2}
    with stage("code"):  # of no frame
        clock(4)
    assert seconds == {"code": 1, "torch": 2}


def test_a_frame_that_dynamo_traces_again_begins_again(clock):
    assert stages.since_frame_began() is None
    stages.frame_goes_on()
    assert stages.since_frame_began() is None
    with stages.frame_begins():
        clock(1)
        assert stages.since_frame_began() == 1
        clock(2)
        stages.frame_goes_on()
        clock(4)
        assert stages.since_frame_began() == 4
    assert stages.since_frame_began() is None


@pytest.fixture
def ticking(monkeypatch):
    """A clock that tells how often it has been asked: every stage takes time."""
    asked = itertools.count(1.0)
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(asked))


@pytest.mark.end_to_end
@pytest.mark.usefixtures("ticking", "no_kernels")
@pytest.mark.parametrize("policy", ["auto", "selective", "none"])
def test_of_a_frame_every_stage_is_told(monkeypatch, policy):
    monkeypatch.setattr(automatic, "LEAST_READ", 0)
    layer = models.Layer(models.MLA(128, 4, 96, 64, 32, 16, 40), 128, 224)
    inputs = torch.randn(2, 16, 128).requires_grad_(), *models.rotary_tables(16, 16, torch.device("cpu"), torch.float32)
    with torch._inductor.config.patch(fx_graph_cache=False), megacpp_compile.record() as report:
        torch.compile(layer, backend="megacpp", options={} if policy == "auto" else {"policy": policy})(*inputs)
    (frame,) = report.frames
    assert set(STAGES) - {"plan"} <= set(frame.seconds) and ("plan" in frame.seconds) is (policy != "none")
    assert set(frame.passes) <= set(frame.seconds)
    row = next(line for line in str(report).partition("compile time")[2].splitlines() if line.strip().startswith("0 "))
    assert (row.split()[5] != "-") is (policy != "none")


@pytest.mark.usefixtures("no_kernels")
def test_a_frame_in_which_nothing_fires_is_timed_whole():
    with megacpp_compile.record() as report:
        torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), backend="megacpp")(torch.ones(2, 8))
    (frame,) = report.frames
    assert {"dynamo", "analysis", "torch"} <= set(frame.seconds)
