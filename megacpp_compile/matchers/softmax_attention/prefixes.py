"""Masks under which each query sees the keys up to its own place and those of a prefix: `(j <= i) | (j < prefix)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers.latent_attention.integers import DATA, NotRows, Sum, is_through, viewed
from megacpp_compile.matchers.latent_attention.masks import AND, OR, limits_of
from megacpp_compile.matchers.softmax_attention.parts import Attention, Groups, Term
from megacpp_compile.matchers.ssd.atoms import is_one
from megacpp_compile.matchers.ssd.packed import alike


@dataclasses.dataclass(frozen=True)
class Prefix:
    """So many keys: `number`, or `node + number`, where `node` is a size, or a tensor with `dims` of the batch."""

    number: int
    node: Node | None = None
    dims: Groups = ()

    def emit(self, build: Builder, like: Node, arrange: Callable[..., Node], batch: tuple[Any, ...]) -> Node:
        """Integers [b or 1]."""
        if self.node is None or not isinstance(value(self.node), torch.Tensor):
            made = build(aten.full.default, [1], self.number, dtype=torch.int64, device=value(like).device)
            return made if self.node is None else build(aten.add.Tensor, made, self.node)
        own = {a for d in self.dims for a in d}
        made = arrange(build, (self.node, self.dims), (batch if own else (),))
        return build(aten.add.Tensor, made, self.number) if self.number else made


def prefix_of(found: Attention, term: Term, node: Node, hidden: bool) -> tuple[Sum, Prefix] | None:
    """(a sum that is at most 0 where a key is seen by its distance, the prefix that is seen beside) of a condition."""
    try:
        either = _either(node, hidden, len(term.dims))
    except NotRows:
        return None
    for own, rest in (either, either[::-1]) if len(either) == 2 else ():
        if len(own) == 1 and (prefix := _keys_before(found, term, rest)) is not None:
            return own[0], prefix
    return None


def _either(node: Node, hidden: bool, rank: int) -> list[list[Sum]]:
    """The limits of two conditions, one of which has to hold, over the dimensions of the scores."""
    target, args = node.target, node.args
    if target in (aten.logical_not.default, aten.bitwise_not.default):
        return _either(args[0], not hidden, rank)  # type: ignore[arg-type]
    if target in (AND if hidden else OR):
        return [limits_of(one, hidden) for one in args[:2]]
    if is_through(node):
        return [viewed(node, limits) for limits in _either(args[0], hidden, rank)]  # type: ignore[arg-type]
    raise NotRows("it is data")


def _keys_before(found: Attention, term: Term, limits: list[Sum]) -> Prefix | None:
    """The prefix that keys are in where `limits` hold; of two one may ask that the query is in it, too, as a query
    behind it sees its keys by their distance."""
    of: dict[str, Prefix | None] = {}
    for limit in limits:
        steps = list(zip(limit.over(len(term.dims)), term.dims, strict=True))
        side = [(name, dim) for name, dim in (("s", found.keys), ("t", found.queries)) if dim and (1, dim) in steps]
        if len(side) != 1 or side[0][0] in of:
            return None
        of[side[0][0]] = _prefix(found, limit, [(n, d) for n, d in steps if n and d != side[0][1]])
    told = [one and (one.number, one.node, one.dims) for one in of.values()]
    return of.get("s") if None not in told and all(alike(one, told[0]) for one in told) else None


@or_none
def _prefix(found: Attention, limit: Sum, others: list[tuple[int, Any]]) -> Prefix | None:
    NoMatch.when(len(limit.parts) > 1 or any(n != DATA or not d or not set(d) <= set(found.batch) for n, d in others))
    if not limit.parts:
        return Prefix(1 - limit.number) if not others else None
    times, node = limit.parts[0]
    if times != -1 or not isinstance(value(node), torch.Tensor):
        return Prefix(1 - limit.number, node) if times == -1 and not others else None
    long = [n for n in value(node).shape if not is_one(n)]
    NoMatch.when(len(long) != len(others) or len(long) > 1)
    dims = tuple(() if is_one(n) else tuple(others[0][1]) for n in value(node).shape)
    return Prefix(1 - limit.number, node, dims)
