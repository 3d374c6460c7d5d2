"""Matches a matrix with a gate for every token and expert, zero but for the chosen experts.

The proof is in how it is computed: gates scattered into zeros, all choices at once or one after the other, a sum over
one-hots of the choices, a softmax of minus infinity elsewhere, or a multiple, quotient or cast of such a matrix. A
softmax over all experts is none: it gives every expert a share in every token.

Sums over experts that are sums over choices, too, have none: in `einsum("tk,tke,ted->td", gates, one_hots, outs)` the
matrix would be the sum over k alone. Experts may have run once for each choice (`"tk,tke,tked->td"`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import SOFTMAXES
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import DETACH
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.routing import Mask, distinct_choices, match_mask
from megacpp_compile.matchers.views import is_cast, is_outer_view
from megacpp_compile.reader.dims import permutation
from megacpp_compile.reader.factors import Axis, Dims, Factor, factors, longer_dims, over, seen_as
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import column_of, part_of
from megacpp_compile.reader.products import multiplied

_TURNS = (aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default)
_SCATTERS = (aten.scatter.src, aten.scatter_add.default)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A matrix [.., E] that is zero but at `indices` [.., k], or [..] for one choice, where it is `gates`; where these
    are None, the rewrite gathers them from the matrix. `column`: the one of the choices that counts; None for all."""

    indices: Node
    gates: Node | None = None
    column: int | None = None


def match_chosen(node: Node, transposed: bool = False) -> Chosen | None:
    """The distinct choices that `node` [.., E], or where it is `transposed` [E, T], is made of; None where it is not,
    or the graph does not show it."""
    found = _elsewhere(node, 0.0, transposed)
    if found is None or not distinct_choices(found.indices):
        return None
    return found


def _elsewhere(node: Node, number: float, transposed: bool = False) -> Chosen | None:
    """The choices everywhere but at which `node`, perhaps `transposed`, is `number`."""
    node = through(node, is_cast, aten.clone.default, aten.alias.default, aten.contiguous.default)
    target, args = node.target, node.args
    if not isinstance(value(node), torch.Tensor) or node.op != "call_function":
        return None
    last = value(node).dim() - 1
    if (found := _through_each(node, number, transposed)) is not None:
        return found
    if transposed:
        mask = match_mask(node) if number == 0 else None
        return None if mask is None else _of_mask(dataclasses.replace(mask, dims=mask.dims[::-1]))
    if target in (*_SCATTERS, aten.scatter.value) and is_filled(args[0], number):
        whole = value(args[2]).dim() == last + 1 and args[1] in (-1, last)
        if not whole or not all(map(same_size, value(args[2]).shape[:-1], value(node).shape[:-1])):
            return None
        given = args[3] if target is not aten.scatter.value else None
        if isinstance(given, Node) and not all(map(same_size, value(given).shape, value(args[2]).shape)):
            return None
        return Chosen(args[2], given)  # type: ignore[arg-type]
    if target in _SCATTERS:
        return _choice_by_choice(node, number)
    if (filled := _filled_elsewhere(node, number)) is not None:
        return _of_mask(filled)
    if number != 0:
        return None
    if (mask := match_mask(node)) is not None and (chosen := _of_mask(mask)) is not None:
        return chosen
    return _one_hots(node)


def _through_each(node: Node, number: float, transposed: bool) -> Chosen | None:
    """The choices that `node` has from a matrix that it turns, or of each number of which it is a function."""
    target, args = node.target, node.args
    dims = value(node).dim()
    if target in _TURNS and dims == 2:
        return _elsewhere(args[0], number, transposed != (permutation(node) == [1, 0]))  # type: ignore[arg-type]
    if target is DETACH:
        inner = _elsewhere(args[0], number, transposed)  # type: ignore[arg-type]
        return None if inner is None else dataclasses.replace(inner, gates=None)
    if number != 0:
        return None
    over = (0, -2) if transposed else (-1, dims - 1)
    if target in SOFTMAXES and args[1] in over or target is aten.sigmoid.default:
        inner = _elsewhere(args[0], -math.inf, transposed)  # type: ignore[arg-type]
        return None if inner is None else dataclasses.replace(inner, gates=None)
    sides = {aten.mul.Tensor: args, aten.div.Tensor: args[:1]}.get(target, ())  # type: ignore[arg-type]
    for side in sides:
        whole = isinstance(value(side), torch.Tensor) and value(side).dim() == dims
        if whole and all(map(same_size, value(side).shape, value(node).shape)):
            inner = _elsewhere(side, number, transposed)  # type: ignore[arg-type]
            if inner is not None:
                return dataclasses.replace(inner, gates=None)
    return None


@or_none
def _choice_by_choice(node: Node, number: float) -> Chosen | None:
    """The choices where `node` scatters gates of one tensor, those of one choice of every token after the other."""
    last, outer = value(node).dim() - 1, value(node).shape[:-1]
    columns: list[tuple[tuple[Node, int], tuple[Node, int]]] = []
    while node.target in _SCATTERS:
        base, dim, *given = node.args
        found = [match_column(one) for one in given if isinstance(one, Node)]
        alike = (value(one).shape for one in given)
        NoMatch.when(dim not in (-1, last) or len(found) != 2 or None in found)
        NoMatch.when(not all(len(shape) == last + 1 and all(map(same_size, shape, (*outer, 1))) for shape in alike))
        columns.append(tuple(found))  # type: ignore[arg-type]
        node = base  # type: ignore[assignment]
    indices, gates = (matrix for matrix, _ in columns[0])
    in_turn = sorted(at for (_, at), _ in columns) == list(range(len(columns)))
    same = all(a[0] is indices and b[0] is gates and a[1] == b[1] for a, b in columns)
    whole = all(same_size(value(one).shape[-1], len(columns)) for one in (indices, gates))
    return Chosen(indices, gates) if in_turn and same and whole and is_filled(node, number) else None


def _of_mask(mask: Mask) -> Chosen | None:
    """The choices that `mask` [.., E] marks."""
    if not mask.by_token or mask.expert is not None or len(mask.dims) != len(mask.tokens) + 1:
        return None
    column = None if mask.choice is None else _column(mask)
    return Chosen(mask.indices, column=mask.choice) if column is None else Chosen(column)


def _filled_elsewhere(node: Node, number: float) -> Mask | None:
    """The mask everywhere but at which `node` is filled with `number`."""
    kept = _kept_where(node, number)
    return match_mask(kept[1]) if kept is not None and same_shape(kept[1], node) else None


def _kept_where(node: Node, number: float) -> tuple[Node, Node] | None:
    """(x, marks) where `node` is x where the marks hold, and `number` elsewhere."""
    target, args = node.target, node.args
    if target is aten.masked_fill.Scalar and args[2] == number:
        marks = _negated(args[1])
        return None if marks is None else (args[0], marks)  # type: ignore[return-value]
    filled = target is aten.where.ScalarOther and args[2] == number
    filled = filled or target is aten.where.self and is_filled(args[2], number)
    return (args[1], args[0]) if filled else None  # type: ignore[return-value]


def _column(mask: Mask) -> Node | None:
    """The one of a token's choices that `mask` is about, [..]."""
    last = value(mask.indices).dim() - 1
    columns = (u for u in mask.indices.users if u.target is aten.select.int and u.args[1] in (-1, last))
    width = value(mask.indices).shape[-1]
    return next((u for u in columns if u.args[2] % width == mask.choice), None)  # type: ignore[operator]


@or_none
def _one_hots(node: Node) -> Chosen | None:
    """The choices whose one-hots, times gates, `node` adds up for every token."""
    NoMatch.when(node.target not in (aten.sum.dim_IntList, aten.einsum.default, aten.bmm.default, aten.matmul.default))
    dims = over(node)
    NoMatch.when(not dims or not dims[-1])
    own = {a for d in dims for a in d}
    parts = factors(node, dims, lambda axes: axes == own or set(dims[-1]) < axes)
    for hot in parts:
        inner = hot.axes - own
        if len(inner) > 1:
            continue
        wanted = (*dims[:-1], tuple(inner), *dims[-1:])
        seen = seen_as(hot, wanted)
        mask = match_mask(before_casts(seen[0])) if seen else None
        if mask is None or not mask.by_token or mask.dims[-2:] != ("s", "e") or value(mask.indices).dim() != len(dims):
            continue
        rest = [p for p in parts if p is not hot]
        gates = seen_as(rest[0], wanted[:-1]) if len(rest) == 1 else None
        if gates is not None and value(gates[0]).dim() == value(mask.indices).dim():
            return Chosen(mask.indices, gates[0])
        if len(rest) != 1 and all(p.axes <= own | inner for p in rest):
            return Chosen(mask.indices)  # whatever the gates are multiplied by, others' are zero
    return None


def before_casts(node: Node) -> Node:
    """`node` before casts, also of integers and masks to floats."""
    return through(node, aten._to_copy.default, aten.to.dtype, is_cast)


@or_none
def match_chosen_gate(node: Node, source: Callable[[Node], Node | None] = lambda n: n) -> tuple[Node, Node, int] | None:
    """(indices [.., k], gates [.., k], e) where `node` [.., 1] or [..] is the sum of a token's gates whose choice is e.

    source: of gates and marks what they are parts of, where only some of the tokens' are summed.
    """
    node = _without_last_dim(node)
    NoMatch.when(node.target is not aten.sum.dim_IntList)
    product, last = node.args[0], value(node.args[0]).dim() - 1
    NoMatch.when(list(node.args[1]) not in ([last], [-1]))  # type: ignore[arg-type]
    product = through(product, is_cast)
    assert isinstance(product, Node)
    kept = _kept_where(product, 0.0)
    for gates, mark in multiplied(product) if kept is None else [kept]:
        own, marks = source(gates), source(before_casts(mark))
        mask = None if own is None or marks is None else match_mask(before_casts(marks))
        if own is None or mask is None or not mask.by_token or mask.dims[-1] != "s" or mask.expert is None:
            continue
        if all(map(same_size, value(own).shape, value(mask.indices).shape)):
            return mask.indices, own, mask.expert
    return None


def _negated(node: Any) -> Node | None:
    """The mask that `node` negates."""
    if not isinstance(node, Node):
        return None
    negated = node.target in (aten.bitwise_not.default, aten.logical_not.default)
    return node.args[0] if negated or node.target is aten.eq.Scalar and node.args[1] == 0 else None  # type: ignore[return-value]


def _without_last_dim(node: Node) -> Node:
    """`node`, a number a token, before casts and views that give it a last dimension of 1."""
    views = aten.unsqueeze.default, aten.clone.default, aten.alias.default
    return through(node, is_cast, views, lambda n: is_outer_view(n) and value(n).shape[-1:] == (1,))


def match_column(node: Node) -> tuple[Node, int] | None:
    """(matrix [.., E], e) where `node` is its column e, as [.., 1] or [..]."""
    node = _without_last_dim(node)
    part = part_of(node)
    if part is not None and part.dim == 0 and permutation(part.source) == [1, 0]:
        one = isinstance(part.start, int) and isinstance(part.whole, int) and same_size(part.size, 1)
        return (part.source.args[0], part.start) if one else None  # type: ignore[return-value]
    return column_of(node)


@dataclasses.dataclass(frozen=True)
class RouteAxes:
    """`tokens`: the axes of the result but its channels, none for a single token; `routes`: the axis of experts or
    choices that is summed, none for a single choice; `base`: what the sum is added to; `chosen`:
    the choices of a sum that runs over these too, or why they cannot be read; `each`: the axis of choices where experts
    run once for each, which is the last of the tokens' then; `scales`: what multiplies the sum, see `RoutedExperts`."""

    tokens: tuple[Axis, ...]
    routes: tuple[Axis, ...]
    base: Node | None = None
    chosen: Chosen | MatchFailure | None = None
    each: Axis | None = None
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = ()

    @property
    def both(self) -> set[Axis]:
        return {*self.tokens, *self.routes}

    @property
    def choices(self) -> int | None:
        """The number of routes, if it is fixed."""
        size = self.routes[0].size if self.routes else 1
        return size if isinstance(size, int) else None

    @property
    def outer(self) -> Dims:
        return tuple((t,) for t in self.tokens) or ((),)

    def rows(self, *behind: tuple[Axis, ...]) -> list[Dims]:
        """Both layouts of rows: a dimension for each axis of tokens or one for all, then `behind`."""
        return [(*self.outer, *behind), (self.tokens, *behind)]

    def place(self, dims: Dims, out: Axis) -> int | None:
        """The dimension of routes among `dims`, which but for that and those of size 1 are rows of channels `out`."""
        place = dims.index(self.routes) if self.routes in dims else None
        rows = () if place is None else longer_dims(dims[:place] + dims[place + 1 :])
        return place if rows in map(longer_dims, self.rows((out,))) else None

    def slots(self, *behind: tuple[Axis, ...]) -> list[Dims]:
        """Both layouts of slots: a dimension for each axis of tokens and for routes or one for all, then `behind`."""
        return [(*self.outer, self.routes, *behind), ((*self.tokens, *self.routes), *behind)]


@dataclasses.dataclass(frozen=True)
class OverChoices:
    """A sum over choices and experts: its `other` factors, without one-hots and their gates; the axis `experts`; the
    choices, or why these cannot be read; and the axis of choices, `each`, where experts run once for each."""

    other: list[Factor]
    experts: Axis
    chosen: Chosen | MatchFailure
    each: Axis | None = None


def over_choices(node: Node, parts: list[Factor], tokens: tuple[Axis, ...], out: Axis) -> OverChoices | None:
    """The sum `node` of the product of `parts` as one over choices, too, where some of them are no experts'."""
    for hot in parts:
        extra = hot.axes - set(tokens)
        if out in hot.axes or len(extra) != 2 or hot.axes != {*tokens, *extra}:
            continue
        wide = set[Axis]().union(*(p.axes for p in parts if p.axes - hot.axes))
        for choice in extra:
            (expert,) = extra - {choice}
            beside = [p for p in parts if p is not hot and choice in p.axes and p.axes <= hot.axes]
            if expert not in wide:
                continue
            split = factors(hot.node, hot.dims, lambda axes, own=hot.axes: axes == own)  # type: ignore[misc]
            chosen = _chosen(node, [*split, *beside], tokens, choice, expert)
            if choice in wide and isinstance(chosen, MatchFailure):
                continue  # some other sum over what has three dimensions more
            other = [p for p in parts if p is not hot and p not in beside]
            return OverChoices(other, expert, chosen, choice if choice in wide else None)
    return None


def _chosen(
    node: Node, parts: list[Factor], tokens: tuple[Axis, ...], choice: Axis, expert: Axis
) -> Chosen | MatchFailure:
    """The choices whose one-hots and gates `parts` are."""
    each = tuple((t,) for t in tokens)
    hots = [p for p in parts if expert in p.axes]
    gates = [p for p in parts if p.axes == {*tokens, choice}]
    if len(hots) == len(gates) == 1 and len(parts) == 2:
        marks, own = seen_as(hots[0], (*each, (choice,), (expert,))), seen_as(gates[0], (*each, (choice,)))
        mask = match_mask(before_casts(marks[0])) if marks is not None else None
        if mask is not None and own is not None and mask.by_token and mask.dims[-2:] == ("s", "e"):
            if value(mask.indices).dim() == value(own[0]).dim() == len(tokens) + 1:
                return Chosen(mask.indices, own[0])
    reason = "what is summed over choices and experts is no gate times one-hots of the choices"
    return MatchFailure(node, "gates", reason)
