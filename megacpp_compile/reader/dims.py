"""What a view does to dimensions: which of the view's is which of its operand's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.sizes import hint
from megacpp_compile.fx.views import ALL_PERMUTATIONS, EXPANSIONS, FOLDS, REPETITIONS, RESHAPES, SAME_VALUES, UNIT_DIMS

T = TypeVar("T")
_REPEATS = EXPANSIONS | REPETITIONS
_SEEN = ALL_PERMUTATIONS | SAME_VALUES | EXPANSIONS | RESHAPES | FOLDS | UNIT_DIMS


def permutation(node: Node) -> list[int] | None:
    """Which dimension of its operand each dimension of `node` is; None where `node` is no permutation."""
    if node.target not in ALL_PERMUTATIONS:
        return None
    marked = torch.empty([n + 2 for n in range(value(node).dim())], device="meta")
    return [n - 2 for n in node.target(marked, *node.args[1:]).shape]  # type: ignore[operator]


def permuted(node: Node, dims: Sequence[T]) -> list[T]:
    """The dimensions of `node`, a permutation of what has `dims`."""
    return [dims[d] for d in permutation(node) or ()]


def unpermuted(node: Node, dims: Sequence[T]) -> list[T]:
    """The dimensions of what `node`, which has `dims`, is a permutation of."""
    order = permutation(node) or []
    return [dims[order.index(d)] for d in range(len(order))]


def below(node: Node, dims: Sequence[T], one: T) -> list[T] | None:
    """The dimensions of what `node`, which has `dims`, is all of: a view, a copy or a repetition by `expand`. `one`
    stands for each that is repeated, and for those of size 1 behind a reshape. None where it is none, or a reshape
    merges or splits dimensions."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node) or not isinstance(value(source), torch.Tensor) or node.target not in _SEEN:
        return None
    here, there = value(node).shape, value(source).shape
    if node.target in EXPANSIONS:
        first = len(here) - len(there)
        repeated = [same_size(n, 1) and not same_size(n, m) for n, m in zip(there, here[first:], strict=True)]
        return [one if again else d for d, again in zip(dims[first:], repeated, strict=True)]
    if node.target in ALL_PERMUTATIONS:
        return unpermuted(node, dims)
    if node.target in SAME_VALUES:
        return [*dims]
    places = long_places(node)
    return None if places is None else [dims[places[d]] if d in places else one for d in range(len(there))]


def repetition(node: Node) -> tuple[list[Any], bool] | None:
    """(how often each dimension of `node` repeats what its operand has there; whether entry by entry, not all of
    them over and over). None where `node` is no `expand`, `repeat` or `repeat_interleave`, or repeats the entries of
    several dimensions as those of one."""
    if node.target not in _REPEATS or value(node).dim() < value(node.args[0]).dim():
        return None
    here, there = value(node).shape, value(node.args[0]).shape
    sizes = zip(here, [1] * (len(here) - len(there)) + [*there], strict=True)
    inside = node.target is torch.ops.aten.repeat_interleave.self_int
    return [1 if same_size(n, m) else n // m for n, m in sizes], inside


def regrouped(here: Sequence[Any], there: Sequence[Any]) -> list[tuple[list[int], list[int]]] | None:
    """The dimensions of `here` and of `there`, two shapes of the same elements in the same order, in the shortest runs
    with as many elements, without those of size 1; a symbol counts as its hint. None where there are no such runs."""
    own, theirs = ([d for d, n in enumerate(shape) if not same_size(n, 1)] for shape in (here, there))
    found = []
    while own and theirs:
        a = b = 1
        while (few := _count(here, own[:a])) != (many := _count(there, theirs[:b])):
            a, b = (a + 1, b) if few < many else (a, b + 1)
            if a > len(own) or b > len(theirs):
                return None
        found.append((own[:a], theirs[:b]))
        own, theirs = own[a:], theirs[b:]
    return None if own or theirs else found


def _count(shape: Sequence[Any], dims: Sequence[int]) -> int:
    return math.prod(hint(shape[d]) for d in dims)


def reduced_dims(node: Node) -> tuple[list[int], bool]:
    """(the dimensions, in the order given, over which `node`, a reduction of its first argument, reduces that; whether
    they are kept)."""
    given, keep = [*node.args[1:], None, None][:2]
    given, keep = node.kwargs.get("dim", given), node.kwargs.get("keepdim", keep)
    rank = value(node.args[0]).dim()
    dims = [given] if isinstance(given, int) else given or range(rank)
    return [d % rank for d in dims], bool(keep)


def unreduced(node: Node, dims: Sequence[T]) -> list[T]:
    """Those of `dims`, which its operand has, that `node`, a reduction, leaves."""
    gone, _ = reduced_dims(node)
    return [d for i, d in enumerate(dims) if i not in gone]


def long_places(node: Node) -> dict[int, int] | None:
    """Which dimension of `node` each dimension of its operand that is longer than 1 is; None where `node` does more
    than insert and drop dimensions of size 1."""
    here, there = value(node).shape, value(node.args[0]).shape
    own, theirs = ([d for d, n in enumerate(shape) if not same_size(n, 1)] for shape in (here, there))
    alike = len(own) == len(theirs) and all(same_size(here[a], there[b]) for a, b in zip(own, theirs, strict=True))
    return dict(zip(theirs, own, strict=True)) if alike else None
