"""Integers that masks compare, read as sums: so much for each step along each dimension, a number, and a value that is
data, such as a position."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import GivenUp, NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import EXPANSIONS, IDENTITIES, RESHAPES, SQUEEZES, UNSQUEEZE
from megacpp_compile.matchers.latent_attention.core import constant
from megacpp_compile.reader.dims import long_places, permuted

# A part of a sum: (how often, the node of a number or of a tensor).
Part = tuple[int, Node]
DATA = 1 << 40  # the step along a dimension along which a part has a value for each place


@dataclasses.dataclass(frozen=True)
class Sum:
    """`number + sum(steps[d] * index of dimension d) + parts`; a step of DATA is none."""

    steps: tuple[int, ...]
    number: int = 0
    parts: tuple[Part, ...] = ()

    def __neg__(self) -> Sum:
        steps = tuple(n if n == DATA else -n for n in self.steps)
        return Sum(steps, -self.number, tuple((-n, node) for n, node in self.parts))

    def __add__(self, other: Sum) -> Sum:
        rank = max(len(self.steps), len(other.steps))
        pairs = zip(self.over(rank), other.over(rank), strict=True)
        steps = (DATA if DATA in both else sum(both) for both in pairs)
        return Sum(tuple(steps), self.number + other.number, _merged(self, other))

    def over(self, rank: int) -> tuple[int, ...]:
        """The steps over so many dimensions, of which those in front may be none of this sum's."""
        return (0,) * (rank - len(self.steps)) + self.steps

    def plus(self, number: int) -> Sum:
        return dataclasses.replace(self, number=self.number + number)


def _merged(a: Sum, b: Sum) -> tuple[Part, ...]:
    counts: dict[Node, int] = {}
    for n, node in (*a.parts, *b.parts):
        counts[node] = counts.get(node, 0) + n
    return tuple((n, node) for node, n in counts.items() if n)


class NotRows(GivenUp):
    """The mask is not told by comparing places."""


def number_of(x: Any, times: int = 1) -> Sum:
    if isinstance(x, int):
        return Sum((), times * x)
    if isinstance(x, Node) and not isinstance(value(x), torch.Tensor):
        return Sum((), 0, ((times, x),))
    raise NotRows("it is data")


BY_NUMBER = {
    getattr(getattr(aten, name), kind): getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")
}  # fmt: skip
DTYPES = frozenset({aten._to_copy.default, aten.to.dtype})
_THROUGH = IDENTITIES | RESHAPES | SQUEEZES | EXPANSIONS | DTYPES | {UNSQUEEZE, aten.slice.Tensor, aten.transpose.int}


def is_through(node: Any) -> bool:
    return isinstance(node, Node) and node.target in _THROUGH


def viewed(node: Node, sums: Sequence[Sum]) -> list[Sum]:
    """`sums` over the dimensions of the view that `node` is of its operand."""
    source = node.args[0]
    there, here = value(source).shape, value(node).shape
    padded = [s.over(len(there)) for s in sums]
    if node.target in IDENTITIES or node.target in DTYPES:
        return list(sums)
    if node.target in EXPANSIONS:
        widened = [(0,) * (len(here) - len(there)) + p for p in padded]
        # What was one place is seen from many.
        one = [False] * (len(here) - len(there)) + [same_size(n, 1) for n in there]
        return [dataclasses.replace(s, steps=tuple(0 if o else n for o, n in zip(one, w, strict=True)))
                for s, w in zip(sums, widened, strict=True)]  # fmt: skip
    if node.target is aten.transpose.int:
        return [dataclasses.replace(s, steps=tuple(permuted(node, p))) for s, p in zip(sums, padded, strict=True)]
    if node.target is aten.slice.Tensor:
        _, dim, start, _, step = [*node.args, *(None,) * 4][:5]
        dim = (dim or 0) % len(there)  # type: ignore[operator]
        NotRows.when(
            step not in (None, 1) or isinstance(start, int) and start < 0 or any(p[dim] == DATA for p in padded),
            "it is data",
        )
        return [s + number_of(start or 0, p[dim]) if p[dim] else s for s, p in zip(sums, padded, strict=True)]
    places = NotRows.unless(long_places(node), "it is data")
    placed = [{b: p[a] for a, b in places.items()} for p in padded]
    return [dataclasses.replace(s, steps=tuple(at.get(d, 0) for d in range(len(here))))
            for s, at in zip(sums, placed, strict=True)]  # fmt: skip


def sum_of(x: Any) -> Sum:
    """An integer, or a tensor of integers."""
    if not isinstance(x, Node) or not isinstance(value(x), torch.Tensor):
        return number_of(x)
    fake, target = value(x), x.target
    NotRows.when(fake.dtype.is_floating_point or fake.dtype == torch.bool, "it is data")
    if target in (aten.arange.default, aten.arange.start):
        return Sum((1,)) + (number_of(x.args[0]) if target is aten.arange.start else Sum(()))
    if target in (aten.add.Tensor, aten.sub.Tensor) and not x.kwargs:
        a, b = map(sum_of, x.args[:2])
        return a + (b if target is aten.add.Tensor else -b)
    if (number := constant(x)) is not None:
        return Sum((0,) * fake.dim(), int(number))
    try:
        if is_through(x):
            return viewed(x, [sum_of(x.args[0])])[0]
        if target in _OF_NUMBERS:
            return _OF_NUMBERS[target](x)
    except NotRows:
        pass
    return Sum(tuple(0 if same_size(n, 1) else DATA for n in fake.shape), 0, ((1, x),))


def _difference(x: Node) -> Sum:
    """Of one place and the one before it, of what grows by the same everywhere: numbers of tokens in their order."""
    source, order, dim, before, behind = [*x.args, *(None,) * 4][:5]
    of, rank = sum_of(source), value(source).dim()
    dim = (-1 if dim is None else dim) % rank  # type: ignore[operator]
    step = of.over(rank)[dim]
    NotRows.when(order not in (None, 1) or x.kwargs or behind is not None or step == DATA, "it is data")
    if before is not None:
        first = _at_first(of, dim, rank) + -_at_first(sum_of(before), dim, rank)
        NotRows.when(
            not same_size(value(before).shape[dim], 1) or first.parts or any(first.steps) or first.number != step,
            "it is data",
        )
    return Sum((0,) * rank, step)


def _at_first(of: Sum, dim: int, rank: int) -> Sum:
    """A sum at the first place along `dim`."""
    steps = of.over(rank)
    NotRows.when(steps[dim] == DATA, "it is data")
    return dataclasses.replace(of, steps=(*steps[:dim], 0, *steps[dim + 1 :]))


def _running_sum(x: Node) -> Sum:
    """Of a condition that never holds."""
    source = x.args[0]
    NotRows.when(always(source) is not False, "it is data")  # type: ignore[arg-type]
    return Sum((0,) * value(x).dim())


def _picked(x: Node) -> Sum:
    """Of numbers that are the same everywhere, any."""
    of = sum_of(x.args[0])
    NotRows.when(of.parts or any(of.steps), "it is data")
    return Sum((0,) * value(x).dim(), of.number)


_OF_NUMBERS = {aten.diff.default: _difference, aten.cumsum.default: _running_sum, aten.index.Tensor: _picked}


@or_none
def picked_along(node: Node) -> tuple[Node, tuple[int | None, ...]] | None:
    """(source, for each of its dimensions that of `node` along which its places are taken in order) of an index by
    `arange`s, as `vmap` writes `rows[batch, place]`; None of any other."""
    NoMatch.when(node.target is not aten.index.Tensor)
    source, indices = node.args[0], node.args[1]
    NoMatch.when(
        any(i is None for i in indices) or len(indices) != value(source).dim()  # type: ignore[union-attr,arg-type]
    )
    places = list[int | None]()
    for size, index in zip(value(source).shape, indices, strict=True):  # type: ignore[arg-type]
        try:
            of = sum_of(index)
        except NotRows:
            return None
        along = [value(node).dim() - len(of.steps) + d for d, step in enumerate(of.steps) if step]
        one = same_size(size, 1) and not along
        in_order = len(along) == 1 and of.steps[along[0] - value(node).dim()] == 1
        NoMatch.when(
            of.number or of.parts or not one and not (in_order and same_size(value(node).shape[along[0]], size))
        )
        places.append(along[0] if along else None)
    return source, tuple(places)  # type: ignore[return-value]


def always(node: Node) -> bool | None:
    """Whether a comparison of two integers that are the same everywhere holds; None of any other condition."""
    if node.target not in BY_NUMBER:
        return None
    try:
        gap = sum_of(node.args[0]) + -sum_of(node.args[1])
    except NotRows:
        return None
    return None if gap.parts or any(gap.steps) else bool(BY_NUMBER[node.target](gap.number, 0))
