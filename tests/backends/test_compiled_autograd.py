"""Compiled autograd hands over a backward as a frame of its own: the ops of the forward's rewrites are lowered in it."""

from __future__ import annotations

import copy
import logging
from collections import Counter

import pytest
import torch

from megacpp_compile import analysis, record
from megacpp_compile.errors import CaptureError
from megacpp_compile.fx.provenance import is_backward
from megacpp_compile.report.at_exit import ENDING
from megacpp_compile.targets import CUDA, device_types, family
from tests.backends.models import Layer
from tests.fixtures import kernels_left_out


@pytest.fixture
def graphs():
    """What each compiled graph that ran calls, and how often."""
    ran = []

    def runs(gm):
        ran.append(Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function"))

    with kernels_left_out(runs):
        yield ran


def in_a_compiled_step(model, x, options=None):
    """`loss.backward()` in compiled code; the setting is read when that is made."""

    def step(x):
        model(x).square().sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="megacpp", options=options)(x)


def behind_a_compiled_forward(model, x, options=None):
    loss = torch.compile(model, backend="megacpp", options=options)(x).square().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="megacpp", options=options)):
        loss.backward()


WAYS = [in_a_compiled_step, behind_a_compiled_forward]


def step(way, options=None):
    """(report, model) of a training step whose gradients are eager's."""
    model, x = Layer(), torch.randn(5, 16)
    eager = copy.deepcopy(model)
    eager(x).square().sum().backward()
    with record() as report:
        way(model, x, options)
    for (name, got), want in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4, msg=name)
    return report


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_the_backward_is_lowered(way, graphs, caplog):
    """Regression: its frame could not be captured, and was left with an op of ours in it."""
    with caplog.at_level(logging.WARNING, logger="megacpp_compile"):
        report = step(way)
    forward, backward = [frame for frame in report.frames if frame.left_to != "pieces"]
    assert forward.passes["down_norm_up"] == 1 and not backward.passes
    assert backward.name == "backward (compiled autograd)" and backward.captured and "lowered" in backward.reason
    assert f"{backward.name}: {backward.reason}" in report.summary()
    assert [ran["aten.mm.default"] for ran in graphs] == [2, 4]
    assert not any("megacpp" in target for ran in graphs for target in ran)
    assert not caplog.records and ENDING.text() == ""


@pytest.mark.exhaustive
def test_with_kernels():
    assert len(step(behind_a_compiled_forward).frames) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_asked_of_the_model_is_not_asked_of_its_backward(way, graphs):
    """Each of these is an error in a frame that does not have what it names."""
    options = {"require": {"down_norm_up": 1}, "policy": "selective", "block_kinds": {"*up": "ablock"}}
    report = step(way, options)
    assert report.counts["down_norm_up"] == 1
    assert "backward (compiled autograd)" in [frame.name for frame in report.frames]


def test_a_backward_whose_forward_ran_in_eager(graphs):
    def way(model, x, options):
        loss = model(x).square().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="megacpp")):
            loss.backward()

    (frame,) = step(way).frames
    assert frame.captured and len(graphs) == 1


def test_what_is_no_backward_and_what_is_handed_over_in_a_list():
    assert not is_backward(torch.fx.symbolic_trace(Layer()))
    with torch.device("meta"):
        inputs = [[torch.ones(1), [torch.ones(1)]], 3]
    assert device_types(inputs) == {"meta"}
    assert family(device_types([[torch.empty(0)]]) | {"cuda"}) is CUDA


def test_an_op_that_is_called_in_a_frame_that_is_not_captured_is_lowered(graphs, monkeypatch):
    """Inductor would call it as it is."""

    def refuses(*_):
        raise CaptureError("a planted lie")

    monkeypatch.setattr(analysis, "capture", refuses)
    x, weights = torch.randn(5, 16), (torch.randn(8, 16), torch.ones(8), torch.randn(24, 8))

    def calls(x, down, gain, up):
        return torch.ops.megacpp.down_norm_up(x, down, None, gain, [up], 1e-6, 0, 8)[0][0].sin()

    want = calls(x, *weights)
    with record() as report:
        got = torch.compile(calls, backend="megacpp")(x, *weights)
    torch.testing.assert_close(got, want)
    assert [frame.captured for frame in report.frames] == [False]
    assert [ran["aten.mm.default"] for ran in graphs] == [2]
