"""These tests need torch_xla, and run on its CPU device unless PJRT_DEVICE names another (`make test-xla`)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HERE = os.path.dirname(__file__)
MISSING = importlib.util.find_spec("torch_xla") is None

# LLVM's own optimisations of what runs but a few times. What XLA makes of a program's HLO, which tests read, stays.
if os.environ.get("PJRT_DEVICE", "CPU") == "CPU":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


def pytest_collection_modifyitems(items):
    for item in items:
        if MISSING and str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.skip(reason="needs torch_xla: make test-xla"))


@pytest.fixture(scope="session")
def xla():
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla

    return torch_xla.device()


@pytest.fixture
def fresh():
    """Nothing compiled or counted before."""
    import torch_xla.debug.metrics as metrics

    torch._dynamo.reset()
    metrics.clear_all()
    yield
    torch._dynamo.reset()


@pytest.fixture
def rand():
    """Draws on CPU that are the same in float32 and float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size, dtype=torch.float32):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return draw
