"""Matches slots that are sorted by expert: where each expert's rows end, the running count of its slots, however these
are counted, or the place behind the last of them; and the slots of one expert as a part of all.

A part goes from where the expert before ends to its own end:

    for e, n in enumerate(counts.tolist()): rows = ordered[start : start + n]; start += n
    for e, rows in enumerate(ordered.split(counts.tolist())): ...
    for e, rows in enumerate(ordered.split([int((ids == e).sum()) for e in range(experts)])): ...

Ends are numbers read from counts and added up, or from running sums of counts, with a zero in front or without.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensor
from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx import assumptions
from megacpp_compile.fx.edit import attribute_of, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import DETACH, IDENTITIES
from megacpp_compile.matchers.moe.routing import is_nonnegative, match_mask, scores_of
from megacpp_compile.matchers.views import RESHAPES
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.index_reads import row_read
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import concatenated, part_of

_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
_SORTS = (aten.sort.default, aten.sort.stable)
_COPIES = (aten.lift_fresh_copy.default, aten._to_copy.default, aten.to.dtype, aten.to.device, DETACH, *IDENTITIES)
_SUMS = (aten.sum.default, aten.count_nonzero.default)
_PLACES = (aten.searchsorted.Tensor, aten.bucketize.Tensor)
_CONSTANT = "_tensor_constant"  # what tracing names the tensors that code makes of numbers
_ITEMS = (aten.item.default, aten._local_scalar_dense.default)
_ADDS = (operator.add, aten.add.Tensor, aten.add.Scalar)


def ascends(order: Node) -> bool:
    """Whether `order` is an ascending argsort of numbers in one dimension."""
    return order.target in _ARGSORTS and len(order.args) == 1 and not order.kwargs.get("descending")


@or_none
def sorted_by(order: Node) -> SortedIds | None:
    """The numbers, in one dimension, whose ascending order `order` is."""
    NoMatch.when(not isinstance(value(order), torch.Tensor) or value(order).dim() != 1)
    if ascends(order):
        return SortedIds(order.args[0], order, None)  # type: ignore[arg-type]
    NoMatch.when(order.target is not operator.getitem or order.args[1] != 1)
    sort: Any = order.args[0]
    NoMatch.when(sort.target not in _SORTS or len(sort.args) != 1 or sort.kwargs.get("descending"))
    first = next((u for u in sort.users if u.target is operator.getitem and u.args[1] == 0), None)
    return SortedIds(sort.args[0], order, first)


def unordered(node: Node) -> Node | None:
    """What `node` is with its numbers, in one dimension, sorted or put in an order that a sort gives; else None."""
    if node.target is operator.getitem and node.args[1] == 0 and node.args[0].target in _SORTS:  # type: ignore[union-attr]
        numbers: Any = node.args[0].args[0]  # type: ignore[union-attr]
        return numbers if value(numbers).dim() == 1 else None
    read = row_read(node)
    ids = None if read is None else sorted_by(read[1])
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
        if node is self.ordered or (read := row_read(node)) is not None and read[1] is self.order and (
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


@or_none
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
    NoMatch.when(summed != {*range(last)} or value(marks).shape[-1] != experts)
    NoMatch.when(marks.target is not aten.scatter.value or marks.args[1] not in (-1, last) or marks.args[3] != 1)
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


def whole_of(node: Node) -> Node | None:
    """What `node` is some of the rows of, which follow one another."""
    part = part_of(node)
    return part.source if part is not None and part.kept and (part.dim, part.step) == (0, 1) else None


def expert_of_part(ids: SortedIds, part: Node) -> int | None:
    """The expert whose slots the rows of `part` are, where those of `whole_of(part)` lie in the order of `ids`."""
    if part.target is aten.slice.Tensor:
        return expert_between(ids, *([*part.args[2:4], None, None][:2]))
    split, at = part.args
    if split.target is not aten.split_with_sizes.default:  # type: ignore[union-attr]
        return None
    counted = [_expert_counted(ids, size) for size in split.args[1][: at + 1]]  # type: ignore[union-attr, index, operator]
    return at if counted == list(range(at + 1)) else None  # type: ignore[operator, return-value]


def expert_between(ids: SortedIds, start: Any, end: Any) -> int | None:
    """The expert whose slots, sorted, begin at `start` and end at `end`."""
    first, last = before(ids, 0 if start is None else start), before(ids, end)
    return first if first is not None and last == first + 1 else None


def expert_without(ids: SortedIds, none: tuple[Any, ...]) -> int | None:
    """The expert that has no slots wherever `none`, see `none_counted`, are none."""
    count = none[0] if len(none) == 1 or _is_zero(none[1]) else none[1] if _is_zero(none[0]) else None
    if count is not None and (expert := _expert_counted(ids, count)) is not None:
        return expert
    return expert_between(ids, *none) if len(none) == 2 else None


@or_none
def before(ids: SortedIds, place: Any) -> int | None:
    """The expert at whose first slot `place` is: as many slots as there are of experts with lower numbers."""
    counted, terms = list[int](), [place]
    while terms:
        term = terms.pop()
        if not isinstance(term, Node):
            NoMatch.when(type(term) is not int or term != 0)
            continue
        term = _read(term)
        if term.target is torch.sym_sum:
            terms.extend(term.args[0])  # type: ignore[arg-type]
        elif term.target in _ADDS and len(term.args) == 2 and not term.kwargs:
            terms.extend(term.args)
        elif (expert := _expert_counted(ids, term)) is not None:
            counted.append(expert)
        elif not _is_zero(term):
            entry = _entry(term)
            first = NoMatch.unless(None if entry is None else _begins(ids, *entry))
            counted.extend(range(first))
    return len(counted) if sorted(counted) == list(range(len(counted))) else None


def _begins(ids: SortedIds, places: Node, at: int) -> int | None:
    """The expert at whose first slot entry `at` of `places` is."""
    places = number(places)
    size = value(places).shape[0]
    if not isinstance(size, int):
        return None
    if ids.end_at(places, size):
        return at + 1
    if places.target is aten.sub.Tensor and not places.kwargs:  # ends, without each expert's own
        ends, counts = places.args
        return at if ids.end_at(ends, size) and ids.counted_by(counts, size) else None  # type: ignore[arg-type]
    ends = _behind_zero(places)
    return at if ends is not None and ids.end_at(ends, size - 1) else None


def _behind_zero(places: Node) -> Node | None:
    """What `places` has behind a zero."""
    if len(parts := concatenated(places)) == 2:
        return number(parts[1]) if value(parts[0]).shape == (1,) and _is_zero(parts[0]) else None
    if places.target is aten.slice_scatter.default and is_filled(places.args[0], 0):
        _, rest, *where = places.args
        whole = where[:2] == [0, 1] and not isinstance(where[2:3], Node) and where[3:] in ([], [1])
        fits = isinstance(rest, Node) and value(rest).shape[0] == value(places).shape[0] - 1
        return number(rest) if whole and fits else None  # type: ignore[arg-type]
    if places.target is aten.constant_pad_nd.default and list(places.args[1]) == [1, 0]:  # type: ignore[arg-type]
        return number(places.args[0]) if [*places.args, 0][2] == 0 else None  # type: ignore[arg-type]
    return None


def _is_zero(node: Node) -> bool:
    """Whether `node` is zero: a tensor filled with it, or a constant of the code's."""
    node = number(node)
    if node.op == "get_attr" and str(node.target).startswith(_CONSTANT):
        constant = attribute_of(node.graph.owning_module, node.target)
        return not isinstance(constant, FakeTensor) and not constant.any()
    return is_filled(node, 0)


@or_none
def _expert_counted(ids: SortedIds, count: Any) -> int | None:
    """The expert of which `count` is the number of slots."""
    NoMatch.when(not isinstance(count, Node))
    count = _read(count)
    if (entry := _entry(count)) is None:
        return ids.counted_alone(count) if isinstance(value(count), torch.Tensor) else None
    NoMatch.when(not isinstance(size := value(entry[0]).shape[0], int))
    return entry[1] if ids.counted_by(entry[0], size) else None


def _read(node: Node) -> Node:
    """`node` before it is read as a number, and before copies and casts."""
    return through(node, _ITEMS, is_converted)


def _entry(node: Node) -> tuple[Node, int] | None:
    """(numbers [n], i) where `node` is their entry i."""
    part = part_of(node)
    if part is None or part.kept or value(part.source).dim() != 1 or not isinstance(part.whole, int):
        return None
    return (part.source, part.start) if isinstance(part.start, int) else None
