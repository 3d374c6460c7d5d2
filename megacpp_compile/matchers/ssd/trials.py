"""Trials of several readings of a subgraph, one after another: the first that is proved, or why the best is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from megacpp_compile.matchers.ssd.atoms import NoAxes

T = TypeVar("T")
Other = TypeVar("Other")


class Refusal(Protocol):
    """Why a reading is none. stage: how far it got, the furthest being the best reason."""

    @property
    def stage(self) -> int: ...


No = TypeVar("No", bound=Refusal)


def tried(attempt: Callable[[], T], failed: Callable[[str], Other]) -> T | Other:
    """What `attempt` finds, or what `failed` makes of the reason for which the subgraph cannot be run small."""
    try:
        return attempt()
    except NoAxes as error:
        return failed(str(error))


def best_of(found: Iterable[T | No], none: No) -> T | No:
    """The first of `found` that is no refusal; else the refusal that got furthest, the first of such: `none` or one of
    `found`."""
    best = none
    for one in found:
        if not isinstance(one, type(none)):
            return one
        best = one if one.stage > best.stage else best
    return best
