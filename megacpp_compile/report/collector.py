"""Collects what compilations do into the reports that are open.

    with record() as report:
        model(x)
    print(report)

The compiler calls `emit_frame` once per frame. It goes to every `record()` that the thread which compiles has open; a
thread that has opened none, such as autograd's own or a pool's worker, reports to every `record()` that is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from megacpp_compile.report.at_exit import ENDING
from megacpp_compile.report.attention import AttentionCall, counted
from megacpp_compile.report.records import CompiledRegion, Frame, MissedFusion, Site, lock
from megacpp_compile.report.report import Report


@dataclass(eq=False)
class _Opened:
    report: Report
    trial: bool = False
    open: bool = True  # a copied context, such as an asyncio task's, may outlive the `with` it was copied in


# Of this context, which a new thread begins without, the innermost last; and of all threads.
_own: ContextVar[tuple[_Opened, ...]] = ContextVar("megacpp_reports", default=())
_everywhere: list[_Opened] = []


@contextmanager
def record(known_passes: Iterable[str] = ()) -> Iterator[Report]:
    """Collect what is compiled inside: by this thread, and by threads that have no `record()` of their own open.

    Two threads that each open one get what they compile themselves. May be nested: each gets what is compiled inside.

    Args:
        known_passes: passes that `Report.counts` lists even when no frame ran them.
    """
    opened = _Opened(Report(tuple(known_passes)))
    with lock:
        _everywhere.append(opened)
    _own.set((*_own.get(), opened))
    try:
        yield opened.report
    finally:
        opened.open = False
        with lock:
            _everywhere.remove(opened)
        _own.set(tuple(other for other in _own.get() if other.open))


@contextmanager
def aside() -> Iterator[Report]:
    """Collect what this thread compiles inside for this report alone: a trial is not reported to the others that are
    open. What other threads compile is reported as if there were no trial."""
    opened, before = _Opened(Report(), trial=True), _own.get()
    _own.set((opened,))
    try:
        yield opened.report
    finally:
        opened.open = False
        _own.set(before)


def _receivers() -> list[Report]:
    """The reports that what this thread compiles belongs to. To be called under the lock."""
    own = [opened.report for opened in _own.get() if opened.open]
    return own or [opened.report for opened in _everywhere]


def emit_estimate(estimate: dict[str, Any]) -> None:
    """Attach an estimate to the reports that are open for this thread."""
    with lock:
        for report in _receivers():
            report.estimate = estimate


def emit_attention(call: AttentionCall) -> None:
    """Add an eager call of `attention` to the reports that are open for this thread."""
    if not _everywhere and not _own.get():  # the usual case, and calls are many
        return
    with lock:
        for report in _receivers():
            counted(report.attention, call)


def active() -> bool:
    """Whether any `record()` is open for this thread, so that the compiler may skip what only reports need."""
    with lock:
        return bool(_receivers())


def reported(misses: Iterable[MissedFusion]) -> bool:
    """Whether reports are open for this thread, and each has `misses` already: the same lines for the same reasons."""
    said = {(m.pass_name, m.tag, m.reason, m.source) for m in misses}
    with lock:
        held = [{(m.pass_name, m.tag, m.reason, m.source) for m in report.misses} for report in _receivers()]
    return bool(held) and all(said <= one for one in held)


def emit_frame(
    frame: Frame, sites: Sequence[Site] = (), misses: Sequence[MissedFusion] = (), at_exit: bool = False
) -> None:
    """Add a compiled frame to the reports that are open for this thread. at_exit: count it for what the process says
    when it ends too, unless this is a trial."""
    with lock:
        if at_exit and not any(opened.trial for opened in _own.get() if opened.open):
            ENDING.note(frame, sites)
        for report in _receivers():
            report.add(frame, sites, misses)


def emit_misses(frame: Frame, misses: Sequence[MissedFusion]) -> None:
    """Add what was found of a compiled frame while it runs to the reports that are open for this thread and have it."""
    with lock:
        for report in _receivers():
            index = next((f.index for f in reversed(report.frames) if f.name == frame.name), None)
            if index is not None:
                report.misses.extend(replace(miss, frame=index) for miss in misses)


def emit_regions(regions: Iterable[CompiledRegion]) -> None:
    """Add to the reports that are open for this thread what they do not know yet."""
    with lock:
        for report in _receivers():
            report.regions.extend(region for region in regions if region not in report.regions)
