"""The garbage collector while frames are compiled."""

from __future__ import annotations

import gc
import importlib

import pytest
import torch

from megacpp_compile.frontend.garbage import no_full_collections


@pytest.fixture(autouse=True)
def thresholds(few_objects):
    before = gc.get_threshold()
    gc.collect()  # from now on Python counts old objects from none
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.enable()


@pytest.fixture
def collected():
    """The generations that are collected."""
    seen = []
    told = lambda phase, info: seen.append(info["generation"]) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(told)
    yield seen
    gc.callbacks.remove(told)


def objects():
    """More than a quarter of those that there are, from which on Python collects them all; so many that while frames are
    compiled it would, too."""
    return [[] for _ in range(200_000)]


def test_old_objects_wait_and_young_ones_are_collected(collected):
    with no_full_collections():
        collected.clear()  # of what came before
        kept = objects()
        inside = [*collected]
    assert 0 in inside and 2 not in inside
    kept.extend(objects())
    assert 2 in collected


def test_what_was_set_is_set_again_by_the_last_to_leave():
    first, second = no_full_collections(), no_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 1
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (10, 1, 1)
    with pytest.raises(ValueError, match="inside"), no_full_collections():
        raise ValueError("inside")
    assert gc.get_threshold() == (10, 1, 1)


def test_a_collector_that_is_off_stays_off(collected):
    gc.disable()
    with no_full_collections():
        assert not gc.isenabled()
    gc.enable()
    gc.set_threshold(0)
    collected.clear()
    with no_full_collections():
        kept = objects()
    assert kept and not collected and gc.get_threshold()[0] == 0


@pytest.mark.usefixtures("no_kernels")
def test_frames_of_this_backend_alone(monkeypatch):
    module = importlib.import_module("megacpp_compile.backend")
    inside, compiled = [], module.compile_frame

    def noted(*args, **kwargs):
        inside.append(gc.get_threshold()[2])
        return compiled(*args, **kwargs)

    def other_backend(gm, inputs):
        inside.append(gc.get_threshold()[2])
        return gm.forward

    def double(x):
        return x.sin() * 2

    monkeypatch.setattr(module, "compile_frame", noted)
    torch.compile(double, backend="megacpp", fullgraph=True)(torch.randn(8))
    assert len(inside) == 1 and inside[0] > 1000 and gc.get_threshold() == (10, 1, 1)
    torch._dynamo.reset()
    torch.compile(double, backend=other_backend)(torch.randn(8))
    assert inside[1:] == [1]
