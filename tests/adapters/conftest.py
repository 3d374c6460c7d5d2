"""Transformer Engine for the tests of this folder, as for those of precision, and Dynamo's state as for memory's."""

from tests.memory.conftest import clean  # noqa: F401
from tests.precision.conftest import stand_in, state, te  # noqa: F401
