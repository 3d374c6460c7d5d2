"""What tests of what Dynamo traces start from."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.sharding.one_rank import one_rank  # noqa: F401

SETTINGS = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")


@pytest.fixture
def fresh():
    """Nothing traced or counted before; and what Dynamo is told is afterwards what it was."""
    torch._dynamo.reset()
    counters.clear()
    before = [getattr(torch._dynamo.config, name) for name in SETTINGS]
    yield
    assert [getattr(torch._dynamo.config, name) for name in SETTINGS] == before
