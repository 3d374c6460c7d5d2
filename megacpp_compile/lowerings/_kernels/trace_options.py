"""Flags that a kernel launch reads: whether to measure block sizes, to become a node of a graph, or only to compile."""

from __future__ import annotations

import contextlib
import contextvars

from megacpp_compile.fx.held import held

_measure: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_autotune", default=False)
_traced: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_traced", default=False)
_ahead: contextvars.ContextVar[bool] = contextvars.ContextVar("megacpp_ahead", default=False)


def measuring() -> bool:
    """Whether kernels choose their block sizes by measurement (`Config.autotune`)."""
    return _measure.get()


def traced() -> bool:
    """Whether a launch is to be recorded in a graph rather than made."""
    return _traced.get()


def ahead() -> bool:
    """Whether a launch only has its kernel compiled, of tensors that are nowhere yet."""
    return _ahead.get()


def autotune(on: bool) -> contextlib.AbstractContextManager[None]:
    """A context in which kernels measure their choices of block sizes, or with `on` false take the built-in ones."""
    return held(_measure, on)


def tracing() -> contextlib.AbstractContextManager[None]:
    """A context in which a launch becomes a node of the graph being traced."""
    return held(_traced, True)


def compiling_ahead() -> contextlib.AbstractContextManager[None]:
    """A context in which ops run on fake tensors, so that what they would launch is compiled."""
    return held(_ahead, True)
