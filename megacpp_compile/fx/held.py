"""What a context variable is while something runs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def held(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Within it `variable` is `value`, and behind it what it was before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
