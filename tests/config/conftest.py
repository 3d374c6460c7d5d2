"""Dynamo's state and a group of one rank for the tests of this folder."""

from tests.memory.conftest import clean  # noqa: F401
from tests.sharding.one_rank import one_rank as group  # noqa: F401
