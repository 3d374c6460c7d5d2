"""What an attention that is spelled out consists of, its dimensions told by atoms (`matchers/ssd/atoms`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.ssd.atoms import Atom, Dim, flat, is_one

Groups = tuple[tuple[Atom, ...], ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A factor of a product, before what repeats it for the heads that share it. repeated: the dimensions it has
    then."""

    node: Node
    dims: Groups
    repeated: Groups


@dataclasses.dataclass(frozen=True)
class Term:
    """What is done to scores with `dims`. kind: "bias", added `factor` times; "seen" and "hidden", of bool, with `fill`
    for the scores that are not seen."""

    node: Node
    kind: str
    dims: Groups
    factor: float = 1.0
    fill: float = float("-inf")

    def beside(self, node: Node) -> Groups:
        """The dimensions of what is broadcast to the scores."""
        return beside(node, self.dims)


def beside(node: Node, dims: Any) -> Groups:
    sizes = value(node).shape
    own = dims[len(dims) - len(sizes) :]
    return tuple(() if is_one(n) else tuple(d) for n, d in zip(sizes, own, strict=True))


@dataclasses.dataclass(frozen=True)
class Gain:
    """A tensor that scores are multiplied by, such as a learned temperature of each head, or divided by."""

    node: Node
    dims: Groups
    divides: bool = False


@dataclasses.dataclass(frozen=True)
class Scores:
    """`softcap * tanh(sum(scale * q k) / softcap)`, or without `softcap`, and `terms` in the order they are applied.
    products: (queries, keys, scale). gains: what their sum is multiplied by, or divided by, beside."""

    dims: tuple[Dim, ...]
    products: tuple[tuple[Operand, Operand, float], ...]
    softcap: float | None = None
    terms: tuple[Term, ...] = ()
    sinks: tuple[Node, Groups] | None = None
    sinks_first: bool = False
    gains: tuple[Gain, ...] = ()

    def times(self, number: float) -> Scores | None:
        if self.terms and number < 0:
            return None  # what is hidden would be all that is seen
        terms = tuple(
            dataclasses.replace(t, factor=t.factor * number, fill=t.fill * number) for t in self.terms
        )
        if self.softcap is not None:
            return dataclasses.replace(self, softcap=self.softcap * number, terms=terms)
        products = tuple((q, k, scale * number) for q, k, scale in self.products)
        return dataclasses.replace(self, products=products, terms=terms)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """`node` draws which probabilities are dropped, each with the probability `p`."""

    node: Node
    p: float


@dataclasses.dataclass(frozen=True)
class Attention:
    """`result`, whose dimensions are `result_dims`, is softmax(scores) values, or dropout(softmax(scores)) values.

    softmax: its node, for whatever is said of the site; inside: all nodes from the products to it. batch, heads,
    groups, queries, keys, channels (of each of the scores' products), value_channels: the atoms of each; groups are
    the first of heads. zeros: whether a row that sees no key has zeros.
    """

    softmax: Node
    inside: frozenset[Node]
    scores: Scores
    values: Operand
    result: Node
    result_dims: Groups
    batch: tuple[Atom, ...]
    heads: tuple[Atom, ...]
    groups: tuple[Atom, ...]
    queries: tuple[Atom, ...]
    keys: tuple[Atom, ...]
    channels: tuple[tuple[Atom, ...], ...]
    value_channels: tuple[Atom, ...]
    dropout: Dropout | None = None
    zeros: bool = False


class NotAttention(Exception):
    """It is attention but for this."""

    def __init__(self, node: Node, tag: str, reason: str) -> None:
        self.failure = MatchFailure(node, tag, reason)


def flattened(dims: Any) -> Groups:
    return tuple(tuple(flat(d)) for d in dims)


def grouped(dims: Any) -> Groups:
    return tuple(map(tuple, dims))
