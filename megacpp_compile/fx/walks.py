"""Walks of a graph: what nodes are computed from, and what is computed from them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeVar

from torch.fx import Node

T = TypeVar("T")
_inputs = operator.attrgetter("all_input_nodes")


def reached(starts: Iterable[T], step: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`starts` and all that `step` leads to from these, each once, depth first."""
    pending = list(dict.fromkeys(starts))
    seen = set(pending)
    while pending:
        at = pending.pop()
        yield at
        new = [one for one in dict.fromkeys(step(at)) if one not in seen]
        seen.update(new)
        pending += new


def following(start: T, step: Callable[[T], T | None]) -> Iterator[T]:
    """`start`, what `step` makes of it, what it makes of that, and so on, up to the last of which it makes nothing."""
    at: T | None = start
    while at is not None:
        yield at
        at = step(at)


def levels(starts: Iterable[T], step: Callable[[T], Iterable[T]]) -> Iterator[list[T]]:
    """`starts`, then all that one `step` leads to from these, all that another leads to, and so on, each once."""
    level = list(dict.fromkeys(starts))
    seen = set(level)
    while level:
        yield level
        level = [one for one in dict.fromkeys(one for at in level for one in step(at)) if one not in seen]
        seen.update(level)


def within_steps(start: T, most: int, step: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`start` and all that at most `most` of `step` lead to, each once, the nearest first."""
    return itertools.chain.from_iterable(itertools.islice(levels([start], step), most + 1))


def nearest(starts: Iterable[T], most: int, step: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """The first `most` of `starts` and all that `step` leads to from these, each once, the nearest first."""
    return itertools.islice(itertools.chain.from_iterable(levels(starts, step)), most)


def made_from(
    sources: Container[Node], nodes: Iterable[Node], inputs: Callable[[Node], Iterable[Node]] = _inputs
) -> set[Node]:
    """Those of `nodes`, which are in graph order, that are computed from `sources` by way of such alone."""
    found = set[Node]()
    for node in nodes:
        if any(a in sources or a in found for a in inputs(node)):
            found.add(node)
    return found


def near(node: Node, most: int, step: Callable[[Node], Iterable[Node]] = _inputs) -> list[Node]:
    """`node` and what `step`, by default its inputs, leads to from it, each once, the nearest first, until there are
    `most`."""
    order = [node]
    for at in order:
        order += [one for one in dict.fromkeys(step(at)) if one not in order] if len(order) < most else []
    return order


def ancestors(nodes: Iterable[Node], within: Callable[[Node], Any] = bool) -> Iterator[Node]:
    """`nodes` and what they are computed from by way of nodes of which `within` holds; it is not asked of `nodes`."""
    return reached(nodes, lambda node: filter(within, node.all_input_nodes))


def descendants(nodes: Iterable[Node], within: Callable[[Node], Any] = bool) -> Iterator[Node]:
    """`nodes` and what is computed from them by way of nodes of which `within` holds; it is not asked of `nodes`."""
    return reached(nodes, lambda node: filter(within, node.users))
