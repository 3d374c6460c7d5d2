"""Tells latent attention in the absorbed form (arXiv:2405.04434, 2.1), as a model writes it out itself.

    q[b, h, t] = (W_uk[h] q_nope[b, h, t], q_rope[b, h, t])    k[b, s] = (latent[b, s], rope[b, s])
    v[b, s] = latent[b, s]

Told by where the elements of queries, keys and values come from, as `latent_attention` tells the expanded form: values
are channels of keys that all heads share, and the queries' same channels are products with a weight of each head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.matchers.latent_attention.elements import AXES, Elements, along, cut, levels, places
from megacpp_compile.matchers.latent_attention.up_projections import factor_elements, scaled
from megacpp_compile.matchers.softmax_attention.parts import Attention, Operand
from megacpp_compile.matchers.ssd.atoms import Atom, length
from megacpp_compile.reader.products import CONTRACTED, product_of


@dataclasses.dataclass(frozen=True)
class Absorbed:
    """Attention whose queries `product` multiplies by W_uk. nope: channels before it; latent: after it; shared: the
    keys' others."""

    product: Node
    nope: int
    latent: int
    shared: int


@or_none
def absorbed(found: Attention) -> Absorbed | None:
    """The absorbed form that `found` is, or None."""
    widths = [length([*c]) for c in (*found.channels, found.value_channels)]
    NoMatch.when(not all(isinstance(n, int) for n in (*widths, length([*found.heads]))))
    latents, *others = _pieces(_elements(found, found.values, found.keys, found.value_channels))
    NoMatch.when(others or latents.depends("h"))
    for (q, k, _), channels in zip(found.scores.products, found.channels, strict=True):
        keys = list(_pieces(_elements(found, k, found.keys, channels)))
        for piece in _pieces(_elements(found, q, found.queries, channels)):
            if any(_at(key, piece.samples["c"]).is_that_of(latents) for key in keys):
                made = _per_head(piece, "h" if found.heads else "s")
                if made is not None and made[1] < widths[-1]:
                    return Absorbed(*made, widths[-1], sum(widths[:-1]) - widths[-1])
    return None


def _at(piece: Elements, channels: np.ndarray) -> Elements:
    """The elements of a piece at `channels` of the keys."""
    c, kept = AXES.index("c"), np.flatnonzero(np.isin(piece.samples["c"], channels))
    index = tuple(i if i.shape[c] == 1 else np.take(i, kept, c) for i in piece.index)
    return Elements(piece.node, {**piece.samples, "c": piece.samples["c"][kept]}, index)


def _elements(found: Attention, operand: Operand, rows: tuple[Atom, ...], channels: tuple[Atom, ...]) -> Elements:
    """The elements of an operand by batch, head, `rows` and channel."""
    axes = {"b": found.batch, "h": found.heads, "s": rows, "c": channels}
    samples = {axis: places(length([*atoms]), axis in "hc") for axis, atoms in axes.items()}
    samples["r"] = np.zeros(1, dtype=np.int64)
    digits = dict[Atom, np.ndarray]()
    for axis, atoms in axes.items():
        left = along(axis, samples[axis])
        for atom in reversed(atoms):
            digits[atom], left = left % hint(atom.size), left // hint(atom.size)
    index = []
    for dim in operand.dims:
        place = np.zeros([1] * len(AXES), dtype=np.int64)
        for atom in dim:
            place = place * hint(atom.size) + digits[atom]
        index.append(place)
    return Elements(operand.node, samples, tuple(index))


def _pieces(at: Elements) -> Iterator[Elements]:
    """What lies side by side along the channels, each followed back to what is no view, without a number's factor."""
    last = levels(at)[-1]
    while (times := scaled(last)) is not None:
        last = times[0]
    parts = cut(last)
    if parts is None:
        yield last
    for part in parts or ():
        yield from _pieces(part)


@or_none
def _per_head(at: Elements, heads: str) -> tuple[Node, int] | None:
    """(a product of each head's channels with a weight of its own, how many there are), if `at` is of one. heads: the
    axis that tells them apart, rows where each head's tokens are rows of one."""
    product = NoMatch.unless(product_of(at.node))
    width = value(product.factors[0].node).shape[product.factors[0].dims.index(CONTRACTED)]
    NoMatch.when(not isinstance(width, int))
    samples = {**at.samples, "r": places(width, True)}
    both = [factor_elements(at, factor, samples) for factor in product.factors]
    for x, weight in (both, both[::-1]):
        of_heads = x.depends(heads) and weight.depends(heads) and not x.depends("c")
        if of_heads and not any(weight.depends(axis) for axis in "bs" if axis != heads):
            return at.node, width
    return None
