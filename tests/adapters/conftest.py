"""Transformer Engine for the tests of this folder, as for those of precision."""

from tests.precision.conftest import stand_in, state, te  # noqa: F401
