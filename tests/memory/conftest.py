"""Every test of this folder begins and ends with nothing compiled or counted. `te`: the stand-in alone."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.precision.conftest import one_rank  # noqa: F401
from tests.precision.conftest import stand_in as te  # noqa: F401


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
