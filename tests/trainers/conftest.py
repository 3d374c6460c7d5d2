"""Dynamo's state for the tests of this folder, as for those of memory, and a process group of one rank."""

from tests.memory.conftest import clean  # noqa: F401
from tests.sharding.one_rank import one_rank  # noqa: F401
