"""What tests of this folder start from: Dynamo knows no frame, and a test that asks for it has float8 on a CPU."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.passes import linear
from megacpp_compile.passes._rewrites import experts
from tests.seeds import Draws
from tests.sharding.one_rank import one_rank  # noqa: F401


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def float8(monkeypatch):
    """A CPU multiplies no float8; the question is answered for it, and the reference computes."""
    for question in ("no_float8", "no_block_scales"):
        monkeypatch.setattr(linear, question, lambda device: "")
    monkeypatch.setattr(experts, "no_grouped_float8", lambda device: "")


@pytest.fixture
def rand(request):
    return Draws(request.node.name, torch.bfloat16)
