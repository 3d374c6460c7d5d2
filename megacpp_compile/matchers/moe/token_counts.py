"""Matches how many tokens chose an expert: numbers that are zero where none did, and positive elsewhere."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.size_checks import FINDS
from megacpp_compile.fx.views import COPIES, DETACH
from megacpp_compile.matchers.moe.routing import Mask, match_mask, one_choice, scores_of
from megacpp_compile.matchers.moe.rows import ExpertRows, mask_of, match_rows
from megacpp_compile.matchers.moe.sorted_slots import unordered
from megacpp_compile.matchers.views import RESHAPES
from megacpp_compile.reader.dims import unreduced
from megacpp_compile.reader.index_reads import indexed
from megacpp_compile.reader.links import through

_SUMS = (aten.sum.dim_IntList, aten.any.dim, aten.any.dims, aten.amax.default)
_ALL = (aten.sum.default, aten.any.default, aten.max.default, aten.count_nonzero.default)
_COPIES = COPIES | {DETACH}
_NEAR = 24  # steps
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.to.device)
_WIDE = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16)
_COLUMNS = (aten.squeeze.dim, aten.squeeze.default, aten.select.int, operator.getitem, aten.unbind.int)
# What a count is compared with, for the result to say whether there are any, or whether there are none.
_POSITIVE: dict[Any, int] = {
    aten.gt.Scalar: 0, aten.greater.Scalar: 0, aten.ne.Scalar: 0, aten.not_equal.Scalar: 0, aten.ge.Scalar: 1,
    aten.greater_equal.Scalar: 1, operator.gt: 0, operator.ne: 0, operator.ge: 1,
}  # fmt: skip
_ZERO: dict[Any, int] = {
    aten.eq.Scalar: 0, aten.le.Scalar: 0, aten.less_equal.Scalar: 0, aten.lt.Scalar: 1, aten.less.Scalar: 1,
    operator.eq: 0, operator.le: 0, operator.lt: 1,
}  # fmt: skip
# Comparisons of two places that hold where nothing lies between them, and those that hold where something does: which
# of the two may be the first.
_EITHER, _AS_WRITTEN, _REVERSED = ((0, 1), (1, 0)), ((0, 1),), ((1, 0),)
_WHERE_NONE: dict[Any, tuple[tuple[int, int], ...]] = {
    operator.eq: _EITHER, operator.ge: _AS_WRITTEN, operator.le: _REVERSED,
    aten.eq.Tensor: _EITHER, aten.ge.Tensor: _AS_WRITTEN, aten.le.Tensor: _REVERSED,
}  # fmt: skip
_WHERE_ANY: dict[Any, tuple[tuple[int, int], ...]] = {
    operator.ne: _EITHER, operator.lt: _AS_WRITTEN, operator.gt: _REVERSED, operator.sub: _EITHER,
    aten.ne.Tensor: _EITHER, aten.lt.Tensor: _AS_WRITTEN, aten.gt.Tensor: _REVERSED, aten.sub.Tensor: _EITHER,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Count:
    """How often `mask` holds, over all its dimensions but for that of the experts, if `by_expert`."""

    mask: Mask
    by_expert: bool


@or_none
def match_hits(node: Node) -> Mask | None:
    """The mask over all experts whose numbers, of those that hold anywhere, `node` lists in ascending order."""
    node = through(node, RESHAPES, aten.squeeze.default, aten.squeeze.dim, _COPIES, _CASTS, _is_column)
    if node.target is operator.getitem:
        if (chosen := _distinct(node)) is not None:
            return Mask(chosen, ("e",))
        NoMatch.when(node.args[1] != 0 or node.args[0].target not in FINDS[1:])  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    NoMatch.when(node.target not in FINDS or len(node.args) != 1)
    count = match_count(node.args[0])
    return count.mask if count is not None and count.by_expert and value(node.args[0]).dim() == 1 else None


def _is_column(node: Node) -> bool:
    return node.target is aten.select.int and node.args[1] in (1, -1) and node.args[2] in (0, -1)


def number_chosen_from(counts: Any) -> int | None:
    """Among how many experts the choices were made that `counts` tells; None where that is not seen."""
    count = match_count(counts)
    scores = None if count is None else scores_of(count.mask.indices)
    return None if scores is None else value(scores).shape[-1]


@or_none
def number_listed(node: Node) -> int | None:
    """How many experts may be among those whose numbers `node` lists: as many as there are to choose from, and no more
    than there are counts of which it lists places; None where it lists something else."""
    mask = NoMatch.unless(match_hits(node))
    scores = scores_of(mask.indices)
    chosen_from = None if scores is None else value(scores).shape[-1]
    node = through(node, lambda n: n.op == "call_function" and n.target not in FINDS and _distinct(n) is None)
    if node.target not in FINDS:
        return chosen_from
    counts = value(node.args[0]).shape[0]
    return counts if chosen_from is None or chosen_from > counts else chosen_from


def _distinct(node: Node) -> Node | None:
    """The choices, places of the largest scores, of which `node` is the sorted list without repetitions."""
    chosen = _without_repetitions(node)
    in_order = chosen is not None and node.args[0].args[1:2] in ((), (True,))  # type: ignore[union-attr]
    return chosen if in_order and scores_of(chosen) is not None else None


def _without_repetitions(node: Any) -> Node | None:
    """The numbers of which `node` lists each once."""
    if node.target is not operator.getitem or node.args[1] != 0 or node.args[0].target is not aten._unique2.default:
        return None
    return through(node.args[0].args[0], RESHAPES, _COPIES)


def _of_all(mask: Mask) -> Mask:
    """The mask that holds somewhere where `mask`, one of numbers without repetitions, does: of all of the numbers."""
    listed = through(mask.indices, lambda n: n.target in (*_COPIES, *_CASTS) and not value(n).is_floating_point())
    numbers = _without_repetitions(listed) if mask.choice is None else None
    if numbers is None:
        return mask
    indices, choice = one_choice(numbers)
    return dataclasses.replace(mask, indices=indices, choice=choice)


def match_empty(condition: Any, holds: bool) -> Mask | None:
    """The mask of which nothing holds wherever `bool(condition) == holds`."""
    counts = (match_count(none[0]) for none in none_counted(condition, holds) if len(none) == 1)
    return next((c.mask for c in counts if c is not None and not c.by_expert), None)


def none_counted(condition: Any, holds: bool) -> list[tuple[Any, ...]]:
    """What may be none exactly where `bool(condition) == holds`: (a count,), or what lies from (a place, to another),
    whichever of these two is the first."""
    while isinstance(condition, Node):
        target, args = condition.target, condition.args
        if target in (aten.logical_not.default, aten.bitwise_not.default, operator.not_, torch.sym_not):
            condition, holds = args[0], not holds
        elif len(args) == 2 and not condition.kwargs and all(isinstance(arg, Node) for arg in args):
            orders = (_WHERE_NONE if holds else _WHERE_ANY).get(target, ())
            return [(args[start], args[end]) for start, end in orders]
        elif holds:
            return [(args[0],)] if len(args) == 2 and target in _ZERO and args[1] == _ZERO[target] else []
        else:
            return [(condition,)]
    return []


def match_count(node: Any) -> Count | None:
    """The count that `node` is, or something that is zero and positive where that is."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    target, args = node.target, node.args
    if len(args) == 2 and args[1] == _POSITIVE.get(target, ()):
        return match_count(args[0])
    if target in (*_COPIES, *RESHAPES) or target in _CASTS and value(node).dtype in _WIDE:
        return match_count(args[0]) if _alike(args[0], node) else None
    if target in (aten._local_scalar_dense.default, aten.item.default, *assumptions.COUNTS):
        return match_count(args[0])
    if target is aten.sym_size.int or target is aten.sym_numel.default and value(args[0]).dim() == 1:
        return _rows_found(args[0])
    if target is aten.bincount.default:
        return _binned(node)
    if target is aten.select.int:
        inner = match_count(args[0])
        if inner is None or not inner.by_expert or not isinstance(args[2], int):
            return None
        return Count(dataclasses.replace(inner.mask, expert=args[2]), False) if args[2] >= 0 else None
    return _summed(node)


def _alike(a: Any, b: Node) -> bool:
    return isinstance(a, Node) and value(a).dim() == value(b).dim()


@or_none
def _rows_found(found: Any) -> Count | None:
    """The number of rows in what `nonzero` found, or in what is computed row by row from a read by it."""
    NoMatch.when(not isinstance(found, Node))
    if (rows := _rows_read(found)) is not None:
        return Count(rows.mask, False)
    found = through(found, _COLUMNS, RESHAPES, _COPIES)
    NoMatch.when(found.target not in FINDS or len(found.args) != 1)
    mask = mask_of(found.args[0])
    return Count(mask, False) if mask is not None else None


@or_none
def _rows_read(node: Node) -> ExpertRows | None:
    """The rows of an expert of each of which `node` has a row."""
    for _ in range(_NEAR):
        if (read := indexed(node)) is not None:
            return match_rows(read[1][0])
        fake = value(node)
        NoMatch.when(node.op != "call_function" or not isinstance(fake, torch.Tensor) or not fake.dim())
        count = fake.shape[0]
        below = (n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor) and value(n).dim())
        source = NoMatch.unless(
            next((n for n in below if value(n).shape[0] is count or same_size(value(n).shape[0], count)), None)
        )
        NoMatch.when(isinstance(count, int))
        node = source
    return None


def _binned(node: Node) -> Count | None:
    indices = node.args[0]
    if len(node.args) > 1 and node.args[1] is not None or node.kwargs.get("weights") is not None:
        return None
    assert isinstance(indices, Node)
    indices = through(indices, unordered, RESHAPES, _COPIES, _is_int64_cast)
    indices, choice = one_choice(indices)
    return Count(Mask(indices, ("e",), choice=choice), True)


def _is_int64_cast(node: Node) -> bool:
    return node.target in _CASTS and value(node).dtype == torch.int64


@or_none
def _summed(node: Node) -> Count | None:
    """A mask, summed over dimensions, in one step or several."""
    dims = NoMatch.unless(_left(node))
    mask, left = dims
    if left == ("e",) and mask.expert is None:
        return Count(mask, True)
    return Count(mask, False) if not left and mask.expert is not None else None


@or_none
def _left(node: Any) -> tuple[Mask, tuple[str, ...]] | None:
    """(mask, the dimensions that are left of it)."""
    NoMatch.when(not isinstance(node, Node))
    if (mask := match_mask(node) or mask_of(node)) is not None:
        return _of_all(mask), mask.dims
    if node.target in _COPIES or node.target in _CASTS and value(node).dtype in _WIDE:
        return _left(node.args[0])
    inner = NoMatch.unless(_left(node.args[0]) if node.target in (*_SUMS, *_ALL) and node.args else None)
    NoMatch.when(value(node).dtype not in _WIDE)
    mask, left = inner
    if node.target in _ALL and len(node.args) == 1:
        return mask, ()
    NoMatch.when(node.target not in _SUMS or len(node.args) != 2)
    return mask, tuple(unreduced(node, left))
