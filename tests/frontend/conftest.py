"""What tests of what Dynamo traces start from."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh():
    """Nothing traced or counted before."""
    torch._dynamo.reset()
    counters.clear()
