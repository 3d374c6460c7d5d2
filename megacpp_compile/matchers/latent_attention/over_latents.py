"""Attention over latents: its keys and values are, head by head, what a projection makes of one latent a row, beside
channels of the keys that all heads share.

    k[b, h, s] = (W_uk[h] latent[b, s], rope[b, s])    v[b, h, s] = W_uv[h] latent[b, s]

It is told by where each element of the keys and values comes from (`elements.py`), so that one projection or two, split
before or behind, in any order of dimensions, are the same. W_uk and W_uv may be sums, as with LoRA, and have a bias
(`up_projections.py`). One of the keys adds the same to all scores of a query, which a softmax takes for nothing; one of
the values is a constant of the result, as the weights of a query add up to 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.matchers.latent_attention.core import Core, Operand
from megacpp_compile.matchers.latent_attention.elements import AXES, Elements, along, cut, elements, levels, places
from megacpp_compile.matchers.latent_attention.masks import Seen, SeenRows
from megacpp_compile.matchers.latent_attention.up_projections import Expanded, Term, Times, expanded

# For each dimension of a tensor, where along it an element is: (its first place, axis -> places a step along it).
Places = tuple[tuple[int, Mapping[str, int]], ...]


@dataclasses.dataclass(frozen=True)
class View:
    """Elements of `node`, by axis."""

    node: Node
    places: Places


@dataclasses.dataclass(frozen=True)
class Shared:
    """Channels of the keys that all heads share. part: of the scores they are in; first, width: which of it."""

    rows: View
    part: int
    first: int
    width: int


@dataclasses.dataclass(frozen=True)
class Map:
    """`times * weight (down latent)`: weight [h, c, rank], down [rank, r]; without `down`, `times * weight latent`."""

    weight: View
    down: View | None
    rank: int
    times: Times

    @property
    def inputs(self) -> list[Node]:
        return [self.weight.node, *([] if self.down is None else [self.down.node]), *self.times.nodes]


@dataclasses.dataclass(frozen=True)
class Bias:
    """`times` of what `view` [h, c] has, which may lack either."""

    view: View
    times: Times


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """An attention over latents.

    latent [b, s, r]; w_uk [h, nope, r] and w_uv [h, v, r], each a sum. part, first: which channels of which part's
    queries meet w_uk. biases: of the values. shared: the other channels. sizes: of "b", "h", "t", "s", of "n"
    (nope), "p" (shared), "v" and "r", symbolic or not. expanded: the nodes of what is expanded. seen: up to which
    row a query sees, of each limit; empty where it sees all. given: further rows that are hidden from all queries,
    as data.
    """

    core: Core
    latent: View
    w_uk: tuple[Map, ...]
    w_uv: tuple[Map, ...]
    biases: tuple[Bias, ...]
    part: int
    first: int
    shared: tuple[Shared, ...]
    sizes: dict[str, Any]
    expanded: tuple[Node, ...]
    seen: tuple[Seen, ...] = ()
    given: tuple[SeenRows, ...] = ()


@or_none
def over_latents(core: Core) -> LatentAttention | None:
    """The attention over latents that `core` is, whatever its masks say; None where it is none."""
    samples = NoMatch.unless(samples_of(core))
    keys = [Side(k, samples) for _, k in core.scores]
    values = Side(core.values, samples)
    up = [(i, piece) for i, side in enumerate(keys) for piece in side.expanded]
    NoMatch.when(len(up) != 1 or len(values.pieces) != 1 or len(values.expanded) != 1)
    (part, key), value_ = up[0], values.expanded[0]
    made = NoMatch.unless(_of_one_latent(key, value_))
    base, of_keys, of_values = made
    sizes = {a: core.scores[0][0].size(a) for a in "bht"} | {"s": core.values.size("s"), "r": base.width}
    latent, w_uk, w_uv = _rows(base.latents, "bsr", sizes), _maps(of_keys), _maps(of_values)
    biases = [(_weight(one.at, "hc"), one.times) for one in value_.constants]
    shared = []
    for i, side in enumerate(keys):
        for piece in side.pieces:
            if piece is key.at:
                continue
            at = levels(piece)
            width = len(piece.samples["c"])
            rows = _rows(at, "bsc", {**sizes, "c": width})
            if at[-1].depends("h") or rows is None:
                return None
            shared.append(Shared(rows, i, int(piece.samples["c"][0]), width))
    if latent is None or w_uk is None or w_uv is None or any(view is None for view, _ in biases):
        return None
    channels = key.at.samples["c"]
    sizes |= {"n": len(channels), "p": sum(one.width for one in shared), "v": core.values.size("c")}
    NoMatch.when(sizes["r"] >= sizes["h"] * (sizes["n"] + sizes["v"]))
    added = tuple(Bias(view, times) for view, times in biases if view is not None)
    return LatentAttention(core, latent, w_uk, w_uv, added, part, int(channels[0]), tuple(shared), sizes,
                  (key.node, value_.node))  # fmt: skip


def _of_one_latent(key: Expanded, of_values: Expanded) -> tuple[Term, tuple[Term, ...], tuple[Term, ...]] | None:
    """(a term whose latents all the others are made of, too, those of the keys, those of the values)."""
    for base in key.terms:
        both = [side.of(base.latents[-1]) for side in (key, of_values)]
        if both[0] is not None and both[1] is not None:
            return base, both[0], both[1]
    return None


def _maps(terms: tuple[Term, ...]) -> tuple[Map, ...] | None:
    found = []
    for term in terms:
        weight, down = _weight(term.weight, "hcr"), None if term.down is None else _weight(term.down, "cr")
        if weight is None or down is None and term.down is not None:
            return None
        found.append(Map(weight, down, term.width, term.times))
    return tuple(found)


def samples_of(core: Core) -> dict[str, np.ndarray] | None:
    """Places along each axis to look at elements of keys and values at; None for a single head, or unknown widths."""
    queries, keys = core.scores[0]
    heads, widths = queries.size("h"), [k.size("c") for _, k in core.scores] + [core.values.size("c")]
    if not all(isinstance(n, int) for n in (heads, *widths)) or heads < 2:
        return None
    found = {"b": places(queries.size("b"), False), "s": places(keys.size("s"), False), "h": places(heads, True)}
    return found | {"r": np.zeros(1, dtype=np.int64)}


class Side:
    """Keys or values: the pieces that their channels are made of, and those of them that are expanded latents."""

    def __init__(self, operand: Operand, samples: Mapping[str, np.ndarray]) -> None:
        channels = places(operand.size("c"), True)
        self.pieces = list(pieces_of(elements(operand.node, operand.axes, {**samples, "c": channels})))
        self.expanded = [e for e in map(expanded, self.pieces) if e is not None]


def pieces_of(at: Elements) -> Iterator[Elements]:
    """The pieces of a tensor's channels; one that no projection of heads is in is not taken apart."""
    last = levels(at)[-1]
    parts = cut(last)
    if parts is None:
        yield at
        return
    inner = [piece for part in parts for piece in pieces_of(part)]
    yield from inner if any(expanded(piece) is not None for piece in inner) else [at]


@or_none
def _places(at: Elements, axes: str) -> Places | None:
    """The elements by their axes, where they go in even steps along these and along no other."""
    found = []
    for index in at.index:
        steps, first = dict[str, int](), int(index.reshape(-1)[0])
        for axis in AXES:
            n = AXES.index(axis)
            if index.shape[n] == 1:
                continue
            looked = at.samples[axis]
            rise = np.take(index, 1, n).reshape(-1)[0] - first
            step, rest = divmod(int(rise), int(looked[1] - looked[0]))
            NoMatch.when(rest)
            if step:
                steps[axis] = step
        even: Any = first
        for axis, step in steps.items():
            even = even + along(axis, (at.samples[axis] - at.samples[axis][0]) * step)
        NoMatch.when(not set(steps) <= set(axes) or not (index == even).all())
        # Rows and sequences begin at 0; channels of a piece are counted from its own first.
        found.append((first, steps))
    return tuple(found)


def _rows(at: list[Elements], axes: str, sizes: dict[str, Any]) -> View | None:
    """The tensor nearest to where the rows come from that has a dimension for each of `axes`."""
    for level in reversed(at):
        found = _places(level, axes)
        if found is None or not all(len(steps) <= 1 and set(steps.values()) <= {1} for _, steps in found):
            continue
        named = [axis for _, steps in found for axis in steps]
        wanted = [axis for axis in axes if hint(sizes[axis]) > 1]
        if sorted(named) != sorted(wanted):
            continue
        if all(_fits(value(level.node).shape[d], first, steps, sizes) for d, (first, steps) in enumerate(found)):
            return View(level.node, found)
    return None


def _fits(size: Any, first: int, steps: Mapping[str, int], sizes: dict[str, Any]) -> bool:
    """Whether a dimension can be cut to an axis by numbers."""
    if not steps:
        return True
    (axis,) = steps
    return first == 0 and same_size(size, sizes[axis]) or isinstance(size, int) and isinstance(sizes[axis], int)


def _weight(at: list[Elements], axes: str) -> View | None:
    """The weight itself, or the nearest view of it, by digits of its dimensions; such a view is the keys' rows of a
    weight that has the values' behind them."""
    for level in reversed(at):
        sizes = value(level.node).shape
        found = _places(level, axes) if all(isinstance(n, int) for n in sizes) else None
        if found is not None and all(map(_divides, sizes, found)):
            return View(level.node, found)
    return None


def _divides(size: int, place: tuple[int, Mapping[str, int]]) -> bool:
    """Whether the steps of a place are digits of a dimension of `size`."""
    for step in sorted(place[1].values(), reverse=True):
        if step <= 0 or size % step:
            return False
        size = step
    return True
