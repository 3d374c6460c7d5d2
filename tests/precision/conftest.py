"""Transformer Engine for the tests of this folder: the stand-in on any machine, the real one where there is a GPU."""

from __future__ import annotations

import types

import pytest
import torch

from megacpp_compile.precision import engine
from tests.backends.conftest import float8  # noqa: F401
from tests.sharding.one_rank import one_rank  # noqa: F401

from . import fake_te


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.cuda)])
def te(request, monkeypatch):
    """`.module`: transformer_engine.pytorch; `.device`, `.dtype`: of models it can run; `.real`; `.target`."""
    if request.param == "real":
        module, reason = engine.load()
        if module is None:
            pytest.skip(f"Transformer Engine: {reason}")
        return types.SimpleNamespace(module=module, device="cuda", dtype=torch.bfloat16, real=True, target="auto")
    module = fake_te.install(monkeypatch)
    request.addfinalizer(fake_te.forget)
    return types.SimpleNamespace(module=module, device="cpu", dtype=torch.float32, real=False, target="cuda")


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in alone, for what the real one cannot be made to do."""
    yield fake_te.install(monkeypatch)
    fake_te.forget()


@pytest.fixture
def state():
    """What the stand-in remembers."""
    return fake_te.STATE
