"""Exceptions by which an attempt, such as a match or a rewrite, is given up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class GivenUp(Exception):
    """Ends an attempt; whoever began it catches it."""

    @classmethod
    def when(cls, condition: object, *args: Any, **named: Any) -> None:
        """Raise one where `condition` holds."""
        if condition:
            raise cls(*args, **named)

    @classmethod
    def unless(cls, found: T | None, *args: Any, **named: Any) -> T:
        """`found`; raises one where that is None."""
        if found is None:
            raise cls(*args, **named)
        return found


class NoMatch(GivenUp):
    """What was looked at is not what was sought; `or_none` answers None then."""


def or_none(attempt: Callable[P, T]) -> Callable[P, T | None]:
    """`attempt`, which returns None where it raises NoMatch."""

    @functools.wraps(attempt)
    def called(*args: P.args, **named: P.kwargs) -> T | None:
        try:
            return attempt(*args, **named)
        except NoMatch:
            return None

    return called
