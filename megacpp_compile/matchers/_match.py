"""What a matcher answers where an idiom is nearly there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec, TypeVar

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value

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


def bits_of(node: Node) -> int:
    """The bits of the numbers that `node` holds."""
    return torch.finfo(value(node).dtype).bits


def refuse_narrower(nodes: Iterable[Node], operands: Iterable[Node], whose: str) -> None:
    """Raise Refused where one of `nodes` is computed in fewer bits than `operands`, whose precision that is."""
    bits = min(map(bits_of, operands))
    for n in sorted(nodes):
        if isinstance(value(n), torch.Tensor) and bits_of(n) < bits:
            refuse(n, "precision", f"computed in {value(n).dtype}, lower than {whose}")


def or_failure(match: Callable[P, T]) -> Callable[P, T | MatchFailure]:
    """`match`, which returns the failure with which it is refused."""

    @functools.wraps(match)
    def called(*args: P.args, **named: P.kwargs) -> T | MatchFailure:
        try:
            return match(*args, **named)
        except Refused as refused:
            return refused.failure

    return called
