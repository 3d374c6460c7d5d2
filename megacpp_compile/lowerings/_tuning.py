"""Whether the kernels being traced choose their block sizes by measurement (`Config.autotune`)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_measure: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_autotune", default=False)


def measuring() -> bool:
    return _measure.get()


@contextlib.contextmanager
def autotune(on: bool) -> Iterator[None]:
    """Kernels launched or traced inside measure their choices of block sizes, or take the built-in one."""
    token = _measure.set(on)
    try:
        yield
    finally:
        _measure.reset(token)
