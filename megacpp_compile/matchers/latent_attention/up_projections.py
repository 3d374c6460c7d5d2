"""What makes keys or values of latents: a sum of linear maps of one latent, and a constant beside it.

    W c + s B (A c) + bias

A projection is `W c`, with or without a bias; low-rank paths (LoRA, arXiv:2106.09685, 4.1) are the further terms, in
any spelling and number. Each is told by the elements that it is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.latent_attention.elements import AXES, ZERO, Elements, along, levels, operand, places
from megacpp_compile.reader.products import (
    BROADCAST,
    CONTRACTED,
    Factor,
    Product,
    product_of,
)


@dataclasses.dataclass(frozen=True)
class Times:
    """What a term is multiplied by: a number, and others that are known at run time only."""

    number: float = 1.0
    nodes: tuple[Node, ...] = ()

    def by(self, x: Any) -> Times:
        if isinstance(x, Node):
            return Times(self.number, (*self.nodes, x))
        return Times(self.number * float(x), self.nodes)


@dataclasses.dataclass(frozen=True)
class Constant:
    """What is added to every row: its elements, and those of what it is a view of."""

    at: list[Elements]
    times: Times


@dataclasses.dataclass(frozen=True)
class Term:
    """`times * weight latents`. latents [b, s, r], weight [h, c, r]: their elements, and those of what they are views
    of; width: of r. down: where the latents are narrowed to r first, the weight [c, r] that does it, its c this r."""

    latents: list[Elements]
    weight: list[Elements]
    width: int
    times: Times
    down: list[Elements] | None = None

    @or_none
    def narrowed(self) -> Term | None:
        """The same from what its latents are a product of, or None."""
        at, times = self.latents[-1], self.times
        while (one := scaled(at)) is not None:
            at, times = one[0], times.by(one[1])
        product = product_of(at.node)
        sides = NoMatch.unless(None if product is None else _sides(_channels_of_rank(at), product))
        (latents, weight), _ = sides
        return dataclasses.replace(self, latents=latents, down=weight, times=times)


@dataclasses.dataclass(frozen=True)
class Expanded:
    """Channels that are expanded from latents: `at`, made by `node`, the sum of `terms` and `constants`."""

    at: Elements
    node: Node
    terms: tuple[Term, ...]
    constants: tuple[Constant, ...]

    def of(self, latent: Elements) -> tuple[Term, ...] | None:
        """The terms as maps of `latent`, or None where one is of something else."""
        found = [next((t for t in (term, term.narrowed()) if t is not None and t.latents[-1].is_that_of(latent)), None)
                 for term in self.terms]  # fmt: skip
        return tuple(t for t in found if t is not None) if None not in found else None


def expanded(at: Elements) -> Expanded | None:
    """What the elements are expanded from, by heads, or None."""
    last = levels(at)[-1]
    found = _summands(last, Times()) if last.depends("h") else None
    terms = tuple(one for one in found or () if isinstance(one, Term))
    constants = tuple(one for one in found or () if isinstance(one, Constant))
    return Expanded(at, last.node, terms, constants) if terms else None


def _summands(at: Elements, times: Times) -> list[Term | Constant] | None:
    """What a sum adds up, or None where one of it is something else."""
    of = levels(at)
    last = of[-1]
    node = last.node
    product = product_of(node, biased=True)
    sides = None if product is None else _sides(last, product)
    if product is not None and sides is not None and sides[0][1][0].depends("h"):
        (latents, weight), width = sides
        biases = [] if product.bias is None else [product.bias]
        added = [Constant(levels(Elements(bias, last.samples, last.index[-1:])), times) for bias in biases]
        return [Term(latents, weight, width, times), *added]
    if (one := scaled(last)) is not None:
        found = _summands(one[0], times.by(one[1]))
    else:
        found = _of_both(last, times)
    if found is None and not last.depends("s") and not last.depends("b"):
        return [Constant(of, times)]
    return found


@or_none
def _of_both(at: Elements, times: Times) -> list[Term | Constant] | None:
    """The summands of an addition."""
    node, found = at.node, list[Term | Constant]()
    NoMatch.when(node.target is not aten.add.Tensor or set(node.kwargs) - {"alpha"})
    for x, factor in zip(node.args[:2], (1, node.kwargs.get("alpha", 1)), strict=True):
        source = operand(at, x) if isinstance(x, Node) and isinstance(value(x), torch.Tensor) else None
        some = NoMatch.unless(None if source is None else _summands(source, times if factor == 1 else times.by(factor)))
        found += some
    return found


def scaled(at: Elements) -> tuple[Elements, Any] | None:
    """(the elements of what `at.node` multiplies by a number, that number)."""
    node = at.node
    if node.target in (aten.mul.Tensor, aten.mul.Scalar) and not isinstance(value(node.args[1]), torch.Tensor):
        source = operand(at, node.args[0])  # type: ignore[arg-type]
        return None if source is None else (levels(source)[-1], node.args[1])
    return None


def _sides(last: Elements, product: Product) -> tuple[tuple[list[Elements], list[Elements]], int] | None:
    """((latents, weight) of a product, each with what it is a view of; how many channels it contracts)."""
    width = value(product.factors[0].node).shape[product.factors[0].dims.index(CONTRACTED)]
    if not isinstance(width, int):
        return None
    samples = {**last.samples, "r": places(width, True)}
    both = [factor_elements(last, factor, samples) for factor in product.factors]
    for latents, weight in (both, both[::-1]):
        if any(latents.depends(axis) for axis in "hc") or any(weight.depends(axis) for axis in "bs"):
            continue
        if weight.depends("h") or latents.depends("s"):
            return ([level.at_first("hc") for level in levels(latents)], levels(weight)), width
    return None


def factor_elements(at: Elements, factor: Factor, samples: Mapping[str, np.ndarray]) -> Elements:
    """The elements of a factor that the elements `at` of a product are made of, along "r"."""
    of = {CONTRACTED: along("r", samples["r"]), BROADCAST: ZERO, **dict(enumerate(at.index))}
    return Elements(factor.node, samples, tuple(of[d] for d in factor.dims))


def _channels_of_rank(at: Elements) -> Elements:
    """Rows of "r" channels, as rows of "c"."""
    c, r = AXES.index("c"), AXES.index("r")
    samples = {**at.samples, "c": at.samples["r"], "r": np.zeros(1, dtype=np.int64)}
    return Elements(at.node, samples, tuple(np.swapaxes(index, c, r) for index in at.index))
