"""Two flags that a kernel launch reads: whether to measure block sizes, and whether to become a node of a graph."""

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
    """A context in which kernels measure their choices of block sizes, or with `on` false take the built-in ones."""
    token = _measure.set(on)
    try:
        yield
    finally:
        _measure.reset(token)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """A context in which a launch becomes a node of the graph being traced."""
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)
