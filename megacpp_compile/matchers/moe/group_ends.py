"""Matches where each expert's rows end among slots that are sorted by expert: the running count of its slots, however
these are counted, or the place behind the last of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx import assumptions
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import DETACH, IDENTITIES
from megacpp_compile.matchers.moe.routing import is_nonnegative, match_mask, scores_of
from megacpp_compile.matchers.views import RESHAPES
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.index_reads import indexed
from megacpp_compile.reader.links import through

aten = torch.ops.aten
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
_SORTS = (aten.sort.default, aten.sort.stable)
_COPIES = (aten.lift_fresh_copy.default, aten._to_copy.default, aten.to.dtype, aten.to.device, DETACH, *IDENTITIES)
_SUMS = (aten.sum.default, aten.count_nonzero.default)
_PLACES = (aten.searchsorted.Tensor, aten.bucketize.Tensor)


def ascends(order: Node) -> bool:
    """Whether `order` is an ascending argsort of numbers in one dimension."""
    return order.target in _ARGSORTS and len(order.args) == 1 and not order.kwargs.get("descending")


def sorted_by(order: Node) -> SortedIds | None:
    """The numbers, in one dimension, whose ascending order `order` is."""
    if not isinstance(value(order), torch.Tensor) or value(order).dim() != 1:
        return None
    if ascends(order):
        return SortedIds(order.args[0], order, None)  # type: ignore[arg-type]
    if order.target is not operator.getitem or order.args[1] != 1:
        return None
    sort: Any = order.args[0]
    if sort.target not in _SORTS or len(sort.args) != 1 or sort.kwargs.get("descending"):
        return None
    first = next((u for u in sort.users if u.target is operator.getitem and u.args[1] == 0), None)
    return SortedIds(sort.args[0], order, first)


def unordered(node: Node) -> Node | None:
    """What `node` is with its numbers, in one dimension, sorted or put in an order that a sort gives; else None."""
    if node.target is operator.getitem and node.args[1] == 0 and node.args[0].target in _SORTS:  # type: ignore[union-attr]
        numbers: Any = node.args[0].args[0]  # type: ignore[union-attr]
        return numbers if value(numbers).dim() == 1 else None
    read = indexed(node)
    ids = sorted_by(read[1][0]) if read is not None and len(read[1]) == 1 and isinstance(read[1][0], Node) else None
    whole = ids is not None and value(node).dim() == value(ids.ids).dim() == 1
    return read[0] if whole and same_size(value(read[0]).shape[0], value(node).shape[0]) else None  # type: ignore[index, union-attr]


class SortedIds:
    """The slots' experts `ids` [S], sorted by `order`; `ordered` are the sorted ones, where the sort returns them."""

    def __init__(self, ids: Node, order: Node, ordered: Node | None) -> None:
        self.ids, self.order, self.ordered = ids, order, ordered

    def end_at(self, ends: Node, experts: int) -> bool:
        """Whether `ends` says where each of so many experts' slots end."""
        ends = number(ends)
        if ends.target in _PLACES:
            return self._are_places(ends, experts)
        if ends.target is not aten.cumsum.default or ends.args[1] not in (0, -1):
            return False
        return self.counted_by(ends.args[0], experts)  # type: ignore[arg-type]

    def counted_by(self, counts: Node, experts: int) -> bool:
        """Whether `counts` are the numbers of slots that chose each of so many experts."""
        counts = number(counts)
        filled = counts.target is assumptions.filled_counts
        if counts.target in assumptions.COUNTS and counts.args[1] == experts:
            counts = number(counts.args[0])  # type: ignore[arg-type]
        return self._are_counts(counts, experts, filled)

    def counted_alone(self, count: Node) -> int | None:
        """The expert of which `count` is the number of slots, as `(ids == e).sum()` is."""
        count = through(count, _COPIES, lambda n: n.target in _SUMS and len(n.args) == 1)
        marks, expert = count.args if count.target is aten.eq.Scalar else (None, None)
        return expert if isinstance(expert, int) and self.has(marks) else None

    def has(self, node: Any, in_order: bool = False) -> bool:
        """Whether `node` is the slots' experts, in whatever order if not `in_order`."""
        if not isinstance(node, Node):
            return False
        node = number(node)
        if node is self.ordered or (read := indexed(node)) is not None and read[1] == [self.order] and (
            value(read[0]).dim() == 1 and slots(read[0]) is slots(self.ids)
        ):  # fmt: skip
            return True
        return not in_order and slots(node) is slots(self.ids)

    def _are_places(self, ends: Node, experts: int) -> bool:
        """Whether the search `ends` finds the place behind the last slot of each expert."""
        numbers, within = ends.args[:2] if ends.target is aten.bucketize.Tensor else ends.args[1::-1]
        behind = bool(ends.kwargs.get("right")) or ends.kwargs.get("side") == "right"
        if len(ends.args) > 2 or ends.kwargs.get("sorter") is not None or not self.has(within, in_order=True):
            return False
        if not is_nonnegative(self.ids):  # such a number would count among the first expert's
            return False
        return _counted(numbers) == ((0, experts) if behind else (1, experts + 1))

    def _are_counts(self, counts: Node, experts: int, filled: bool) -> bool:
        """Whether `counts` [experts], or if `filled` no more than these, are the numbers of slots that chose each."""
        target, args = counts.target, counts.args
        if target is aten.histc.default:
            return args[1:] in ((experts, 0, experts - 1), (experts, 0, experts)) and not counts.kwargs and (
                self.has(args[0])
            )  # fmt: skip
        if target is aten.bincount.default:
            least = counts.kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            return (least == experts or filled) and (len(args) < 2 or args[1] is None) and self.has(args[0])
        if target in (aten.scatter_add.default, aten.index_add.default) and not counts.kwargs:
            empty, dim, ids, ones = args
            one_each = is_filled(empty, 0.0) and is_filled(ones, 1.0) and value(ids).dim() == 1
            return one_each and dim in (0, -1) and tuple(value(empty).shape) == (experts,) and self.has(ids)
        if target is aten.sum.dim_IntList:
            chosen = _marked(counts, experts)
            return chosen is not None and self.has(chosen)
        return False


def _counted(numbers: Any) -> tuple[int, int] | None:
    """(first, end) where `numbers` are all whole numbers from the first to before the end."""
    if not isinstance(numbers, Node) or numbers.target not in (aten.arange.default, aten.arange.start):
        return None
    return (0, *numbers.args) if len(numbers.args) == 1 else numbers.args  # type: ignore[return-value]


def _marked(counts: Node, experts: int) -> Node | None:
    """The choices of which `counts` is the sum, over all but experts, of marks: one-hots, or ones scattered to places
    that are distinct."""
    marks = number(counts.args[0])  # type: ignore[arg-type]
    last, summed = value(marks).dim() - 1, {*reduced_dims(counts)[0]}
    mask = match_mask(marks)
    if mask is not None and mask.expert is None and not mask.any and mask.choice is None:
        place = mask.dims.index("e")
        whole = value(marks).shape[place] == experts and summed == {*range(last + 1)} - {place}
        return mask.indices if whole and len(counts.args) == 2 else None
    if summed != {*range(last)} or value(marks).shape[-1] != experts:
        return None
    if marks.target is not aten.scatter.value or marks.args[1] not in (-1, last) or marks.args[3] != 1:
        return None
    empty, _, choices, _ = marks.args
    rows = zip(value(choices).shape[:-1], value(marks).shape[:-1], strict=True)
    alike = is_filled(empty, 0.0) and all(same_size(a, b) for a, b in rows)
    return choices if alike and scores_of(choices) is not None else None  # type: ignore[return-value, arg-type]


def slots(ids: Node) -> Node:
    """What `ids` is a reshape of."""
    return through(ids, RESHAPES, is_converted)


def number(node: Node) -> Node:
    """`node` before conversions of integers to other numbers, and reshapes to its own shape."""
    return through(node, is_converted)


def is_converted(node: Node) -> bool:
    """Whether `node` is integers as other numbers, or a row of them in its own shape."""
    if node.target in RESHAPES:
        return value(node).dim() == value(node.args[0]).dim() == 1
    return node.target in _COPIES and value(node).dtype != torch.bool
