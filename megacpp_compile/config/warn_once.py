"""Warnings that are said once a process."""

from __future__ import annotations

import functools
import logging

_logger = logging.getLogger("megacpp_compile")


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once a process."""
    _logger.warning("%s", text)
