"""`enable()`: calls of `torch.compile` that name no backend, or Inductor, compile with megacpp."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile.errors import UnknownOptionError


@pytest.fixture(autouse=True)
def _put_back():
    before = torch.compile
    yield
    megacpp_compile.enable().disable()
    assert torch.compile is before


@pytest.fixture
def calls(monkeypatch):
    """Arguments that reach torch's own `torch.compile`, which compiles nothing here."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model=None, **kwargs: seen.append(kwargs))
    return seen


class Own(nn.Sequential):
    """With a forward outside of torch, whose own frames `Module.compile` does not trace by themselves (torch 2.13)."""

    def forward(self, x):
        return super().forward(x)


def latents():
    return Own(nn.Linear(16, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 16, bias=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["torch.compile", "decorator", "Module.compile", "backend"])
def test_passes_fire(no_kernels, how):
    model, x = latents(), torch.ones(4, 16)
    want = model(x)
    with megacpp_compile.enable(), megacpp_compile.record() as report:
        if how == "torch.compile":
            got = torch.compile(model)(x)
        elif how == "backend":
            got = torch.compile(model, backend="inductor", dynamic=False)(x)
        elif how == "decorator":
            got = torch.compile(dynamic=False)(model.forward)(x)
        else:
            model.compile()
            got = model(x)
    assert report.counts["down_norm_up"] == 1
    torch.testing.assert_close(got, want)


def test_options_of_inductor_and_of_this_backend_meet(calls):
    with megacpp_compile.enable({"policy": "selective", "inductor": {"max_autotune": True, "epilogue_fusion": True}}):
        torch.compile(options={"epilogue_fusion": False})
        torch.compile(mode="max-autotune-no-cudagraphs")
        torch.compile(mode="default")
    first, second, third = (call["options"] for call in calls)
    assert {call["backend"] for call in calls} == {"megacpp"}
    assert first == {"policy": "selective", "inductor": {"max_autotune": True, "epilogue_fusion": False}}
    assert second["inductor"]["coordinate_descent_tuning"] is True
    assert third["inductor"] == {"max_autotune": True, "epilogue_fusion": True}


def test_other_backends_stay(calls):
    with megacpp_compile.enable():
        torch.compile(backend="eager", mode=None)
    assert calls == [{"backend": "eager", "mode": None}]


def test_the_last_call_counts_also_beneath_another_replacement(calls, monkeypatch):
    outer = megacpp_compile.enable({"policy": "selective"})
    with megacpp_compile.enable({"policy": "full"}) as enabled:
        torch.compile()
    torch.compile()
    enabled.disable()
    outer.disable()
    torch.compile()
    given = [call.get("options") for call in calls]
    assert given == [{"policy": "full"}, {"policy": "selective"}, None] and "backend" not in calls[2]
    calls.clear()
    enabled, inner = megacpp_compile.enable(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model=None, **kwargs: inner(model, **kwargs))
    enabled.disable()
    torch.compile()
    assert calls == [{}]


def test_what_is_left_goes_on_with_what_is_around_it(calls):
    with megacpp_compile.enable({"policy": "selective"}) as outer:
        with megacpp_compile.enable({"policy": "full"}):
            with megacpp_compile.enable({"policy": "none"}):
                torch.compile()
            torch.compile()
        torch.compile()
        with megacpp_compile.enable({"policy": "full"}):
            outer.disable()
            torch.compile()
        torch.compile()  # and what was disabled meanwhile stays so
    torch.compile()
    given = [call.get("options", {}).get("policy") for call in calls]
    assert given == ["none", "full", "selective", "full", None, None]


def test_bad_options_are_an_error_at_once_and_mode_with_options_is_torch_s():
    before = torch.compile
    with pytest.raises(UnknownOptionError, match="polcy"):
        megacpp_compile.enable({"polcy": "selective"})
    assert torch.compile is before
    with megacpp_compile.enable(), pytest.raises(RuntimeError, match="mode or options"):
        torch.compile(latents(), mode="default", options={"max_autotune": True})
