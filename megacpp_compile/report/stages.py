"""Where the seconds of compiling a frame go: a clock for each stage and each piece of one, which stops while another
inside it runs."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megacpp_compile._torch.compile_events import Events
from megacpp_compile.fx.held import held
from megacpp_compile.report import pieces


class _Open(NamedTuple):
    """What goes on: a stage, perhaps a piece (kind, where) of it, of which half of the frame ("" before it has any),
    and the event of torch's that it ends with."""

    stage: str
    piece: tuple[str, str] | None = None
    half: str = ""
    event: str = ""


class _Clock:
    """What of one frame is going on, and since when the innermost is."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.open, self.since = seconds, list[_Open](), 0.0
        self.thread = threading.get_ident()
        self.pieces: dict[tuple[str, str, str], float] = {}

    def change(self) -> None:
        now = time.perf_counter()
        if self.open:
            stage, piece, *_ = self.open[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.since
            if piece is not None:
                self.pieces[stage, *piece] = self.pieces.get((stage, *piece), 0.0) + now - self.since
        self.since = now

    def begin(self, opened: _Open) -> None:
        self.change()
        self.open.append(opened)

    def end(self, place: int) -> None:
        """What was opened at `place`, and whatever inside it never ended, ends."""
        self.change()
        del self.open[place:]

    def piece(self, kind: str, where: str, event: str = "") -> _Open:
        """A piece of the stage that goes on."""
        stage, _, half, _ = self.open[-1]
        return _Open(stage, (kind, ", ".join(filter(None, (where, half)))), half, event)


_clock: contextvars.ContextVar[_Clock | None] = contextvars.ContextVar("megacpp_stages", default=None)
# Since when Dynamo has had the frame that is being compiled.
_began: contextvars.ContextVar[float | None] = contextvars.ContextVar("megacpp_frame_began", default=None)


def _of_this_thread() -> _Clock | None:
    """The clock; none in a thread that a copy of the context was given to."""
    clock = _clock.get()
    return clock if clock is not None and clock.thread == threading.get_ident() else None


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, found: list[dict[str, Any]] | None = None) -> Iterator[None]:
    """Add to `seconds` what the stages inside take, and to its `name` the rest; to `found` the pieces of them, as
    `Frame.pieces` has them."""
    clock = _Clock(seconds)
    token = _clock.set(clock)
    try:
        with stage(name):
            yield
    finally:
        _clock.reset(token)
        if found is not None:
            names = "stage", "kind", "where", "seconds"
            found += [dict(zip(names, (*key, took), strict=True)) for key, took in clock.pieces.items()]


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs inside, or in a function that it decorates, is of the stage `name` of the frame that is being compiled,
    if any is timed."""
    with _inside(lambda clock: _Open(name, None, clock.open[-1].half if clock.open else "")):
        yield


def piece(kind: str, where: str = "") -> contextlib.AbstractContextManager[None]:
    """What runs inside is a piece of the stage that goes on: of a `kind` that `pieces` knows, about `where`."""
    return _inside(lambda clock: clock.piece(kind, where))


@contextlib.contextmanager
def _inside(opened: Callable[[_Clock], _Open]) -> Iterator[None]:
    clock = _of_this_thread()
    if clock is None:
        yield
        return
    place = len(clock.open)
    clock.begin(opened(clock))
    try:
        yield
    finally:
        clock.end(place)


def _event_begins(event: str) -> None:
    """A phase of torch's is a piece where it is known, and tells of which half of the frame others are."""
    if (clock := _of_this_thread()) is None:
        return
    if (half := pieces.HALVES.get(event)) is not None:
        clock.begin(clock.open[-1]._replace(half=half, event=event))
    elif (found := pieces.of_event(event)) is not None:
        clock.begin(clock.piece(*found, event))


def _event_ends(event: str) -> None:
    if (clock := _of_this_thread()) is None:
        return
    for place in reversed(range(len(clock.open))):
        if not clock.open[place].event:  # a stage or piece of ours, which ends by itself
            return
        if clock.open[place].event == event:
            return clock.end(place)


def _builds(what: str) -> contextlib.AbstractContextManager[None]:
    """A piece; what the probe has compiled is of the probe."""
    clock = _of_this_thread()
    if clock is not None and clock.open[-1].piece == clock.piece(pieces.CPP, pieces.BUILT["probe"]).piece:
        return contextlib.nullcontext()
    return piece(pieces.CPP, pieces.BUILT[what])


_events = Events(_event_begins, _event_ends, functools.partial(piece, pieces.KERNEL), _builds)
heard = _events.heard  # a context in which pieces of torch's are told apart


def frame_begins() -> contextlib.AbstractContextManager[None]:
    """Dynamo has a frame inside."""
    return held(_began, time.perf_counter())


def since_frame_began() -> float | None:
    """Seconds since Dynamo began with the frame that is being compiled, or went on with it; None where nobody has seen
    that."""
    return None if (began := _began.get()) is None else time.perf_counter() - began


def frame_goes_on() -> None:
    """Dynamo has the frame again, and may ask for code once more."""
    if _began.get() is not None:
        _began.set(time.perf_counter())
