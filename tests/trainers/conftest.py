"""Dynamo's state for the tests of this folder, as for those of memory, accelerate's, and a process group of one rank."""

import importlib.util

import pytest

from tests.memory.conftest import clean  # noqa: F401
from tests.sharding.one_rank import one_rank  # noqa: F401


@pytest.fixture(autouse=True)
def accelerate_anew():
    """What the first Trainer of a process says of precision and compilation, accelerate keeps for all others."""
    yield
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
