"""The stand-in for Transformer Engine."""

from tests.precision.conftest import stand_in as te  # noqa: F401
