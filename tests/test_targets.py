"""Which target a frame is compiled for, and what is said of the lowerings of each."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.targets_page import PAGE, page
from megacpp_compile import backend, handoff, openxla
from megacpp_compile.errors import TargetUnavailableError
from megacpp_compile.targets import resolve_target


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "python -m benchmarks.targets_page"


def test_who_compiles_for_a_target():
    assert backend._handoff("tpu") == (openxla.plain_openxla, openxla.to_openxla)
    assert backend._handoff("cpu") == backend._handoff("cuda") == (handoff.plain_inductor, handoff.to_inductor)


@pytest.mark.parametrize("there", [False, True])
def test_tpu_asks_for_torch_xla(monkeypatch, there):
    found = importlib.util.find_spec("json") if there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "torch_xla" else None)
    if there:
        assert resolve_target("tpu", []) == "tpu"
    else:
        with pytest.raises(TargetUnavailableError, match="torch_xla"):
            resolve_target("tpu", [])
