"""Random inputs, the same in every run: the seed is the test's own name."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import Draws


@pytest.fixture
def rand(request) -> Draws:
    return Draws(request.node.name, torch.float64)
