"""What the masks of an attention say: distances between queries and keys, documents, or data."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import NEGATIONS
from megacpp_compile.fx.edit import Builder, same_shape, same_size, value
from megacpp_compile.fx.views import PERMUTATIONS, RESHAPES, UNSQUEEZE
from megacpp_compile.fx.walks import reached
from megacpp_compile.matchers.latent_attention import masks
from megacpp_compile.matchers.latent_attention.core import constant, is_low
from megacpp_compile.matchers.latent_attention.integers import NotRows, Sum, picked_along
from megacpp_compile.matchers.softmax_attention.parts import Attention, Term
from megacpp_compile.matchers.softmax_attention.prefixes import Prefix, prefix_of
from megacpp_compile.matchers.ssd.atoms import length
from megacpp_compile.matchers.ssd.packed import alike
from megacpp_compile.reader.dims import permutation
from megacpp_compile.reader.links import chain

# Of a place or a number what it is for itself, such as the chunk it is in.
_OF_EACH = {
    aten.floor_divide.default, aten.div.Tensor_mode, aten.remainder.Scalar, aten.add.Tensor, aten.sub.Tensor,
    aten.mul.Tensor,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Distance:
    """A number of keys: `number + sum(n * node)`, the nodes being sizes."""

    number: int
    parts: tuple[tuple[int, Node], ...] = ()

    @property
    def size(self) -> Any:
        return self.number + sum(n * value(node) for n, node in self.parts)

    def emit(self, build: Builder) -> Any:
        parts = (node if n == 1 else build(operator.mul, node, n) for n, node in self.parts)
        total = build.folded(operator.add, parts)
        return self.number if total is None else build(operator.add, total, self.number) if self.number else total


@dataclasses.dataclass(frozen=True)
class Hidden:
    """One condition of a mask: the distances it means (None where it is data), and what it is as data: `node`, of bool,
    says what is hidden or seen, or is added."""

    term: Term
    node: Node
    kind: str
    fill: float
    left: Distance | None = None
    right: Distance | None = None
    documents: Node | None = None  # numbers of tokens, as queries have them, that have to be equal
    prefix: Prefix | None = None  # keys that are seen whatever `right` says

    @property
    def by_distance(self) -> bool:
        return self.left is not None or self.right is not None


def conditions_of(found: Attention, term: Term) -> list[Hidden] | None:
    """The conditions of a mask; None of a bias."""
    term = _before_unit_dims(term)
    if term.kind == "bias":
        try:
            conditions = masks.added(term.node)
        except NotRows:
            return None
        fill = _lowest(term.node) * term.factor
        one = [_by_distance(found, term, term.node, "bias", fill, part) or _by_number(found, term, fill, part)
               or _by_prefix(found, term, term.node, "bias", fill, part) for part in conditions]  # fmt: skip
        if not conditions or any(part is None for part in one):
            return None
        return [part for part in one if part is not None]
    parts = list[Hidden]()
    for condition in masks.conditions(term.node, term.kind == "hidden"):
        assert not isinstance(condition, list)
        node, kind = condition[0], "hidden" if condition[1] else "seen"
        if node.target is UNSQUEEZE and node is not term.node:
            parts += conditions_of(found, dataclasses.replace(term, node=node, kind=kind)) or ()
            continue
        part = _by_distance(found, term, node, kind, term.fill, condition)
        part = part or _by_prefix(found, term, node, kind, term.fill, condition)
        parts.append(part or Hidden(term, node, kind, term.fill, documents=_documents(found, term, node, kind)))
    return parts


def _before_unit_dims(term: Term) -> Term:
    """The same mask before dimensions of size 1 were put in, such as that of heads."""
    *unsqueezed, base = chain(term.node, UNSQUEEZE)
    dims = term.dims
    for node in unsqueezed:
        rank = value(node).dim()
        at = len(dims) - rank + node.args[1] % rank
        dims = (*dims[:at], *dims[at + 1 :])
    return dataclasses.replace(term, node=base, dims=dims)


def _by_number(found: Attention, term: Term, fill: float, part: Any) -> Hidden | None:
    """A condition of an added mask that compares numbers of documents."""
    if isinstance(part, list):
        return None
    documents = _documents(found, term, part[0], "hidden" if part[1] else "seen")
    return None if documents is None else Hidden(term, term.node, "bias", fill, documents=documents)


def _documents(found: Attention, term: Term, node: Node, kind: str) -> Node | None:
    """The numbers of the queries' documents where a mask compares them with those of the keys, the same numbers."""
    while kind == "hidden" and node.target in NEGATIONS:
        node, kind = node.args[0], "seen"  # type: ignore[assignment]
    if node.target is not (aten.eq.Tensor if kind == "seen" else aten.ne.Tensor):
        return None
    own = [_numbers(found, term, a) for a in node.args[:2]]
    if own[0] is None or own[1] is None or not _same(own[0][0], own[1][0]) or {own[0][1], own[1][1]} != {"t", "s"}:
        return None
    same_tokens = length([*found.queries]) == length([*found.keys]) if found.queries else False
    queries = node.args[0 if own[0][1] == "t" else 1]
    return queries if statically_known_true(same_tokens) else None  # type: ignore[return-value]


@or_none
def _numbers(found: Attention, term: Term, node: Any) -> tuple[Node, str] | None:
    """(a row of integers for each sequence, or one for all, "t" or "s") of a view of it along queries or keys."""
    NoMatch.when(not isinstance(node, Node) or value(node).is_floating_point() or value(node).dtype == torch.bool)
    dims = [d for d in term.beside(node) if d]
    along = [d for d in dims if d in (found.queries, found.keys)]
    NoMatch.when(len(along) != 1 or any(not set(d) <= set(found.batch) for d in dims if d not in along))
    stem = NoMatch.unless(_stem(node))
    fits = len(_long(stem)) == len(dims) and dims[-1] == along[0]
    return (stem, "t" if along[0] == found.queries else "s") if fits else None


@or_none
def _stem(node: Node) -> Node | None:
    """What `node` is a view of, with its dimensions, or an index of all of it, in order; None where they are turned."""
    *views, node = chain(node, {UNSQUEEZE, *PERMUTATIONS, *RESHAPES}, _is_whole_slice)
    for view in views:
        if (order := permutation(view)) is not None:
            long = [d for d in order if not same_size(value(view.args[0]).shape[d], 1)]
            NoMatch.when(long != sorted(long))
    if (picked := picked_along(node)) is not None:
        node, places = picked
        NoMatch.when([p for p in places if p is not None] != sorted(p for p in places if p is not None))
    return node


def _is_whole_slice(node: Node) -> bool:
    return node.target is aten.slice.Tensor and same_shape(node, node.args[0])  # type: ignore[arg-type]


def _same(a: Node, b: Node) -> bool:
    """Whether two rows of integers, tokens last, are one, also where each is made alike of views of one, as the chunks
    of places are, and of what is the same for all tokens, such as where a sequence begins."""
    if alike(a, b):
        return True
    if a.target is not b.target or a.target not in _OF_EACH or a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    tokens = [_long(n)[-1:] for n in (a, b)]
    for x, y in zip(a.args, b.args, strict=True):
        if not all(isinstance(n, Node) and isinstance(value(n), torch.Tensor) for n in (x, y)):
            if not alike(x, y):
                return False
            continue
        own = [_long(n) for n in (x, y)]  # type: ignore[arg-type]
        if alike(x, y):
            if set(own[0]) & set(tokens[0] + tokens[1]):
                return False
            continue
        stems = _stem(x), _stem(y)  # type: ignore[arg-type]
        if [o[-1:] for o in own] != tokens or own[0][:-1] != own[1][:-1] or None in stems or not _same(*stems):  # type: ignore[arg-type]
            return False
    return True


def _long(node: Node) -> list[int]:
    """Where a tensor is longer than 1, counted from its last dimension."""
    shape = value(node).shape
    return [d - len(shape) for d, n in enumerate(shape) if not same_size(n, 1)]


def _by_distance(found: Attention, term: Term, node: Node, kind: str, fill: float, part: Any) -> Hidden | None:
    """A condition that compares places, as one or two distances, of which what is hidden has no weight."""
    if not is_low(fill):
        return None
    try:
        limits = part if isinstance(part, list) else masks.limits_of(*part)
        left, right, more = narrowest([Hidden(term, node, kind, fill, *_sides(found, term, one)) for one in limits])
    except NotRows:
        return None
    return None if more or left is right is None else Hidden(term, node, kind, fill, left, right)


@or_none
def _by_prefix(found: Attention, term: Term, node: Node, kind: str, fill: float, part: Any) -> Hidden | None:
    """A condition that shows the keys of a prefix beside those up to a distance of 0 or more."""
    NoMatch.when(isinstance(part, list) or not is_low(fill))
    told = NoMatch.unless(prefix_of(found, term, *part))
    try:
        left, right = _sides(found, term, told[0])
    except NotRows:
        return None
    NoMatch.when(left is not None or right is None or not statically_known_true(right.size >= 0))
    return Hidden(term, node, kind, fill, right=right, prefix=told[1])


def _sides(found: Attention, term: Term, limit: Sum) -> tuple[Distance | None, Distance | None]:
    """(left, right) of a sum that is at most 0 where a key is seen. Raises NotRows."""
    steps = limit.over(len(term.dims))
    of: dict[str, int] = {"t": 0, "s": 0}
    for step, dim in zip(steps, term.dims, strict=True):
        if step and dim in (found.keys, found.queries) and dim:
            of["s" if dim == found.keys else "t"] = step
        elif step and dim:
            raise NotRows("it is data")
    if any(isinstance(value(node), torch.Tensor) for _, node in limit.parts):
        raise NotRows("it is data")
    distance = Distance(-limit.number, tuple((-n, node) for n, node in limit.parts))
    if abs(of["s"]) != 1 or of["t"] != -of["s"] and (found.queries or of["t"]):
        raise NotRows("it is data")
    return (None, distance) if of["s"] == 1 else (distance, None)


def narrowest(near: list[Hidden]) -> tuple[Distance | None, Distance | None, list[Hidden]]:
    """(the least distance to the left, to the right, the conditions of which that is not known)."""
    least: dict[str, Distance | None] = {"left": None, "right": None}
    more = list[Hidden]()
    for one in near:
        for side in ("left", "right"):
            new, old = getattr(one, side), least[side]
            if new is None:
                continue
            if old is None or statically_known_true(new.size <= old.size):
                least[side] = new
            elif not statically_known_true(old.size <= new.size):
                more.append(one)
    return least["left"], least["right"], more


def _lowest(node: Node) -> float:
    """The number that an added mask hides by; one that is no infinity where that is not seen."""
    below = reached([node], lambda n: [a for a in n.args if isinstance(a, Node)])
    numbers = (constant(a) for n in below for a in n.args if not isinstance(a, (list, tuple)))
    return next((number for number in numbers if number is not None and number <= -60000), -60000.0)
