"""Warnings that are said once a process."""

from __future__ import annotations

import functools
import logging

_logger = logging.getLogger("megacpp_compile")


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once a process."""
    _logger.warning("%s", text)


def raise_or_warn(error: Exception, strict: bool) -> None:
    """Raise `error` under `strict`, else log it as a warning, once a process."""
    if strict:
        raise error
    warn_once(str(error))
