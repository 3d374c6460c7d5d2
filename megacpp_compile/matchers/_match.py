"""What a matcher answers where an idiom is nearly there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from torch.fx import Node

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MatchFailure:
    """A near miss: the first node that differs from the idiom, and why. `tag` is machine-readable."""

    node: Node
    tag: str
    reason: str


class Refused(Exception):
    """Ends a match with a failure, which `or_failure` gives to whoever asked for the match."""

    def __init__(self, failure: MatchFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def refuse(node: Node, tag: str, reason: str) -> NoReturn:
    """Raise Refused."""
    raise Refused(MatchFailure(node, tag, reason))


def refuse_if(condition: object, node: Node, tag: str, reason: str) -> None:
    """Raise Refused where `condition` holds."""
    if condition:
        refuse(node, tag, reason)


def refuse_unless(found: T | None, node: Node, tag: str, reason: str) -> T:
    """`found`; raise Refused where that is None."""
    if found is None:
        refuse(node, tag, reason)
    return found


def or_refuse(found: T | MatchFailure) -> T:
    """`found`; raise Refused where that is a failure."""
    if isinstance(found, MatchFailure):
        raise Refused(found)
    return found


def or_failure(match: Callable[P, T]) -> Callable[P, T | MatchFailure]:
    """`match`, which returns the failure with which it is refused."""

    @functools.wraps(match)
    def called(*args: P.args, **named: P.kwargs) -> T | MatchFailure:
        try:
            return match(*args, **named)
        except Refused as refused:
            return refused.failure

    return called
