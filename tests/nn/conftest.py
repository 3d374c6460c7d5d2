"""Dynamo's state for the tests of this folder, as for those of memory."""

from tests.memory.conftest import clean  # noqa: F401
