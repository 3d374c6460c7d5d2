"""Where the seconds of compiling a frame go: a clock for each stage, which stops while a stage inside it runs."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

Called = TypeVar("Called", bound=Callable[..., Any])

# Beside these a pass has a stage of its own, by its name.
STAGES = {
    "dynamo": "what ran from Dynamo's beginning with the frame until it asked for code",
    "capture": "tracing the frame to ATen",
    "analysis": "what else is done to rewrite it",
    "plan": "deciding what backward recomputes",
    "lowering": "putting lowerings in the place of ops",
    "code": "Inductor's passes over forward and backward, its code, and the compilers it calls",
    "torch": "the rest: tracing the gradient, torch's passes over the joint graph, its partitioner and caches; and all "
    "of Inductor where nothing fired",
}


class _Clock:
    """The stages of one frame that are going on, and since when the innermost is."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.open, self.since = seconds, list[str](), 0.0

    def change(self) -> None:
        now = time.perf_counter()
        if self.open:
            self.seconds[self.open[-1]] = self.seconds.get(self.open[-1], 0.0) + now - self.since
        self.since = now


_clock: contextvars.ContextVar[_Clock | None] = contextvars.ContextVar("megacpp_stages", default=None)
# Since when Dynamo has had the frame that is being compiled.
_began: contextvars.ContextVar[float | None] = contextvars.ContextVar("megacpp_frame_began", default=None)


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add to `seconds` what the stages inside take, and to its `name` the rest."""
    token = _clock.set(_Clock(seconds))
    try:
        with stage(name):
            yield
    finally:
        _clock.reset(token)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs inside is of the stage `name` of the frame that is being compiled, if any is timed."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.change()
    clock.open.append(name)
    try:
        yield
    finally:
        clock.change()
        clock.open.pop()


def in_stage(name: str) -> Callable[[Called], Called]:
    """A function whose calls are of the stage `name`."""

    def of(called: Called) -> Called:
        @functools.wraps(called)
        def call(*args: Any, **kwargs: Any) -> Any:
            with stage(name):
                return called(*args, **kwargs)

        return cast(Called, call)

    return of


@contextlib.contextmanager
def frame_begins() -> Iterator[None]:
    """Dynamo has a frame inside."""
    token = _began.set(time.perf_counter())
    try:
        yield
    finally:
        _began.reset(token)


def since_frame_began() -> float | None:
    """Seconds since Dynamo began with the frame that is being compiled, or went on with it; None where nobody has seen
    that."""
    return None if (began := _began.get()) is None else time.perf_counter() - began


def frame_goes_on() -> None:
    """Dynamo has the frame again, and may ask for code once more."""
    if _began.get() is not None:
        _began.set(time.perf_counter())
