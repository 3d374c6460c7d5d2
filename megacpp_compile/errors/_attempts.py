"""Exceptions by which an attempt, such as a match or a rewrite, is given up."""

from __future__ import annotations

from typing import Any, TypeVar

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
