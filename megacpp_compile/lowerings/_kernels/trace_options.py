"""What a lowering's kernels are told while they are traced for Inductor."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_measure: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_autotune", default=False)
_traced: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_traced", default=False)


def measuring() -> bool:
    """Whether kernels choose their block sizes by measurement (`Config.autotune`)."""
    return _measure.get()


def traced() -> bool:
    """Whether a launch is to be recorded in a graph rather than made."""
    return _traced.get()


@contextlib.contextmanager
def autotune(on: bool) -> Iterator[None]:
    """Kernels launched or traced inside measure their choices of block sizes, or take the built-in one."""
    token = _measure.set(on)
    try:
        yield
    finally:
        _measure.reset(token)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Kernels launched inside are recorded as nodes of the graph being traced."""
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)
