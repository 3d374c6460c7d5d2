"""What every error has, and the words that several messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Protocol

SHOWN = 8  # a message with one line per layer of a deep model would hide its own first line


class Miss(Protocol):
    """What an error shows of a missed fusion: `report.records.MissedFusion` is one."""

    @property
    def fqn(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def reason(self) -> str: ...


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice that `name` was most likely meant to be, or None; case is ignored. cutoff: difflib's, up to 1."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(choice: str | None) -> str:
    return f" Did you mean {choice!r}?" if choice else ""


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


def some(lines: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    rest = len(lines) - SHOWN
    return lines[:SHOWN] + ([f"  and {rest} more"] if rest > 0 else [])


def place(fqn: str, source: str) -> str:
    """`module (file.py:12, in forward: ...)`, from whichever of the two is known."""
    if fqn and source:
        return f"{fqn} ({source})"
    return fqn or source or "an unresolved module"


def _rebuild(cls: type[MegacppError], args: tuple[Any, ...], state: dict[str, Any]) -> MegacppError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class MegacppError(Exception):
    """Base of every error raised by this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the subclass's constructor with the finished message.
        return _rebuild, (type(self), self.args, self.__dict__)


def wrapped_in(error: BaseException) -> MegacppError | None:
    """The error of this package that Dynamo or Inductor wrapped into `error`; None where there is none."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, MegacppError):
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    return inner
