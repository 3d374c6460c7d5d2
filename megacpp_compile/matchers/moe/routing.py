"""Matches which rows go to which expert: `nonzero` of a mask over (token, choice), and reads by its result.

A mask is `indices == e`, or one entry of a one-hot of the indices, with its dimensions in any order.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import EXPANSIONS, PERMUTATIONS, REPETITIONS, UNIT_DIMS
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.dims import permutation, permuted, reduced_dims
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import column_of

_CASTS = (aten._to_copy.default, aten.to.dtype)
_COPIES = (aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default)
_SOME_OR_ALL = {
    *_COPIES, *RESHAPES, *UNIT_DIMS, *PERMUTATIONS, *EXPANSIONS, *REPETITIONS, aten.select.int, aten.slice.Tensor,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Above:
    """That gates are above zero, or only that they are not zero: `gates` are one for each choice, or with `by_expert` a
    matrix with a column for each expert."""

    gates: Node
    by_expert: bool
    above: bool


@dataclasses.dataclass(frozen=True)
class Mask:
    """Where `indices` [T, k] (or [T]) is `expert`.

    Attributes:
        dims: what each dimension runs over: "t" tokens, "s" a token's choices, "e" all experts (then `expert` is None).
            Where tokens have several dimensions, they are "t", "u" and "v" until a reshape makes them one.
        choice: the one of a token's choices that is looked at, in a mask without "s".
        any: whether, in a mask without "s", any of a token's choices counts.
        above: what else has to hold; None for nothing.
        order: the order of slots in which places come, by experts; None for that of the dimensions.
    """

    indices: Node
    dims: tuple[str, ...]
    expert: int | None = None
    choice: int | None = None
    any: bool = False
    above: Above | None = None
    order: Node | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(d for d in self.dims if d in _TOKENS)

    @property
    def by_token(self) -> bool:
        """Whether the tokens' dimensions come first, all of them and in their order."""
        return bool(self.tokens) and self.dims[: len(self.tokens)] == tuple(_TOKENS[: len(self.tokens)])

    def flat(self) -> Mask:
        """The mask with one dimension for all tokens, in their order."""
        at = self.dims.index("t")
        rest = tuple(d for d in self.dims if d not in _TOKENS)
        return dataclasses.replace(self, dims=(*rest[:at], "t", *rest[at:]))


@or_none
def match_mask(node: Node) -> Mask | None:
    """The mask that `node` is."""
    NoMatch.when(node.op != "call_function" or not isinstance(value(node), torch.Tensor))
    target, args = node.target, node.args
    if target is aten.eq.Scalar and isinstance(args[1], int):
        inner = match_mask(args[0])  # type: ignore[arg-type]
        if inner is not None:  # one-hot == 1
            return inner if args[1] == 1 else None
        dims = NoMatch.unless(_dims(args[0]))  # type: ignore[arg-type]
        NoMatch.when(not _integer(args[0]))
        indices, choice = one_choice(_plain(args[0]))  # type: ignore[arg-type]
        return Mask(indices, dims, args[1], choice)
    if target in _OVER_CHOICES and len(args) == 2:
        return _any(node)
    if target is aten.scatter.value:
        return _scattered(node)
    if target is aten.one_hot.default:
        return _of_all(args[0], 0)
    if target is aten.eq.Tensor:
        return _compared(node)
    inner = NoMatch.unless(match_mask(args[0]) if args and isinstance(args[0], Node) else None)
    n = len(inner.dims)
    if target in _COPIES or target in (aten._to_copy.default, aten.to.dtype):
        return inner
    if target in (aten.ne.Scalar, aten.gt.Scalar) and args[1] == 0 and args[1] is not False:
        return inner
    new, old = value(node).shape, value(args[0]).shape
    if target in UNIT_DIMS and len(new) == len(old):  # a squeeze that finds nothing to drop
        return inner
    if target in RESHAPES:
        kept = inner.dims[len(inner.tokens) :]
        alike = len(new) == 1 + len(kept) and all(map(same_size, new[1:], old[len(inner.tokens) :]))
        return inner.flat() if inner.by_token and alike else None
    if permutation(node) is not None:
        return dataclasses.replace(inner, dims=tuple(permuted(node, inner.dims)))
    if target is aten.select.int:
        dim, index = args[1] % n, args[2]  # type: ignore[operator]
        total = value(args[0]).shape[dim]
        rest = inner.dims[:dim] + inner.dims[dim + 1 :]
        if isinstance(index, int) and isinstance(total, int):
            if inner.dims[dim] == "e" and inner.expert is None:
                return dataclasses.replace(inner, dims=rest, expert=index % total)
            if inner.dims[dim] == "s" and inner.above is None and inner.order is None:
                return dataclasses.replace(inner, dims=rest, choice=index % total)
    return None


# A sum of marks is one itself where a token's choices are distinct.
_OVER_CHOICES = {aten.any.dim: True, aten.any.dims: True, aten.amax.default: True, aten.sum.dim_IntList: False}


@or_none
def _any(node: Node) -> Mask | None:
    """The mask of any of a token's choices that `node` is."""
    inner = NoMatch.unless(match_mask(node.args[0]))  # type: ignore[arg-type]
    NoMatch.when("s" not in inner.dims)
    over_choices = {*reduced_dims(node)[0]} == {inner.dims.index("s")}
    NoMatch.when(not over_choices or not (_OVER_CHOICES[node.target] or distinct_choices(inner.indices)))
    return dataclasses.replace(inner, dims=tuple(d for d in inner.dims if d != "s"), any=True)


@or_none
def _scattered(node: Node) -> Mask | None:
    """The mask [.., E] of ones that are scattered to a token's choices."""
    empty, dim, indices, one = node.args
    n = value(node).dim()
    NoMatch.when(dim not in (-1, n - 1) or one != 1 or not is_filled(empty, 0) or value(indices).dim() != n)
    rows = zip(value(indices).shape[:-1], value(node).shape[:-1], strict=True)
    NoMatch.when(not 1 < n <= len(_TOKENS) + 1 or not all(same_size(a, b) for a, b in rows))
    return Mask(_plain(indices), (*_TOKENS[: n - 1], "e"), any=True)  # type: ignore[arg-type]


_TOKENS = "tuv"


def _dims(indices: Node) -> tuple[str, ...] | None:
    """What the dimensions of `indices` run over: tokens, and a token's choices if there are several."""
    n = value(indices).dim()
    if not 0 < n <= len(_TOKENS) + 1:
        return None
    indices, choice = one_choice(_plain(indices))
    found = None if choice is not None or n == 1 else _found_in(indices)
    only = indices.target is aten.squeeze.dim and indices.args[1] in (n, -1)
    only = only or found is not None and value(found[1]).dim() < value(found[0]).dim()  # by `argmax`
    if n == 1 or only or choice is not None:
        return tuple(_TOKENS[:n]) if n <= len(_TOKENS) else None
    return (*_TOKENS[: n - 1], "s")


def one_choice(node: Node) -> tuple[Node, int | None]:
    """(choices [.., k], column) where `node` is one column of them, in the tokens' dimensions or in one for all; (node,
    None) for anything else."""
    node = through(node, is_cast)
    column = column_of(through(node, lambda n: n.target in RESHAPES and value(node).dim() == 1, is_cast))
    if column is None or value(node).dim() >= value(column[0]).dim():
        return node, None
    return _plain(column[0]), column[1]


def _compared(node: Node) -> Mask | None:
    """The mask `indices[..., None] == arange(E)`, or `indices[None] == arange(E)[:, None]`."""
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    for ix, numbers in ((a, b), (b, a)):
        if ix.target is not aten.unsqueeze.default:
            continue
        source = ix.args[0]
        n = value(source).dim()
        if not _integer(source):
            continue
        at = ix.args[1] % (n + 1)  # type: ignore[operator]
        column = numbers.target is aten.unsqueeze.default and numbers.args[1] in (1, -1)
        if at == n and _all_numbers(numbers) or at == 0 and n == 1 and column and _all_numbers(numbers.args[0]):
            return _of_all(source, n - at)
    return None


@or_none
def _of_all(indices: Any, from_end: int) -> Mask | None:
    """The mask of `indices` for all experts, whose dimension stands so far from the last."""
    dims = NoMatch.unless(_dims(indices))
    indices, choice = one_choice(_plain(indices))
    at = len(dims) - from_end
    return Mask(indices, (*dims[:at], "e", *dims[at:]), choice=choice)


def _all_numbers(node: Any) -> bool:
    """Whether `node` is [E], the numbers from 0 on."""
    return node.target is aten.arange.default and len(node.args) == 1  # type: ignore[no-any-return]


def _plain(node: Node) -> Node:
    """`node` before copies and conversions between integers."""
    return through(node, _COPIES, lambda n: n.target in _CASTS and _integer(n) and _integer(n.args[0]))


def _last(node: Node) -> Any:
    return value(node).shape[-1]


def _integer(node: Any) -> bool:
    return value(node).dtype in (torch.int64, torch.int32)


def scores_of(indices: Node) -> Node | None:
    """The scores [.., E] of which `indices` [.., k] are the places of the k largest, so that none comes twice."""
    found = _found_in(indices)
    return None if found is None else found[0]


@or_none
def _found_in(indices: Node) -> tuple[Node, Node] | None:
    """(scores, the node that finds the places of the largest) where `indices` are these places, perhaps with the
    dimensions of tokens in one."""
    node = through(indices, is_cast, _COPIES, _CASTS)
    outer = RESHAPES | {aten.expand.default, aten.unsqueeze.default}
    node = through(node, lambda n: n.target in outer and same_size([1, *value(n.args[0]).shape][-1], _last(n)))
    top = node
    if node.target is operator.getitem and node.args[1] == 1:
        top = node.args[0]  # type: ignore[assignment]
        places = {aten.topk.default: 2, aten.max.dim: 1}
    else:
        places = {aten.argmax.default: 1}
    NoMatch.when(top.target not in places)
    scores = top.args[0]
    last = value(scores).dim() - 1
    dim = top.args[places[top.target]] if len(top.args) > places[top.target] else -1
    NoMatch.when(top.target is aten.argmax.default and len(top.args) == 1)  # the largest of all
    return (scores, node) if dim in (-1, last) else None  # type: ignore[return-value]


def numbers_of_scores(graph: fx.Graph) -> dict[Node, int]:
    """The number of scores among which each node chooses the largest that chooses so."""
    choosing = (aten.topk.default, aten.max.dim, aten.argmax.default, aten.sort.default)
    found = (node for op in choosing for node in graph.find_nodes(op="call_function", target=op))
    lasts = ((node, value(node.args[0]).shape[-1:]) for node in found)
    return {node: last[0] for node, last in lasts if last and isinstance(last[0], int)}


def distinct_choices(indices: Node) -> bool:
    """Whether no token can choose an expert twice: its choices are places that `topk` found, or there is one alone."""
    return value(indices).dim() == 1 or scores_of(indices) is not None


def is_nonnegative(ids: Node) -> bool:
    """Whether `ids` cannot be negative: clamped, or places that `topk`, `argmax` or `sort` found."""
    ids = through(ids, _SOME_OR_ALL, _CASTS)
    if ids.target in (aten.clamp.default, aten.clamp_min.default):
        return isinstance(ids.args[1], int) and ids.args[1] >= 0
    if ids.target is operator.getitem and ids.args[1] == 1:
        return ids.args[0].target in (aten.topk.default, aten.sort.default, aten.max.dim)  # type: ignore[union-attr]
    return ids.target in (aten.argmax.default, aten.argsort.default)
