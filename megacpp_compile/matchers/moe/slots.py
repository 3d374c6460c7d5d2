"""The slots of one expert as a part of all slots, sorted by expert, and the rows of tokens that slots have.

A part goes from where the expert before ends to its own end:

    for e, n in enumerate(counts.tolist()): rows = ordered[start : start + n]; start += n
    for e, rows in enumerate(ordered.split(counts.tolist())): ...
    for e, rows in enumerate(ordered.split([int((ids == e).sum()) for e in range(experts)])): ...

Ends are numbers read from counts and added up, or from running sums of counts, with a zero in front or without.

Slot s is choice s % k of token s // k. In the order `o` of slots, tokens' rows are `x[o // k]`, `x[token[o]]` or
`x[token][o]`, with `token` the number of each slot's token, or `every_choice(x)[o]`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensor
from megacpp_compile.fx.edit import attribute_of, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.matchers.moe.group_ends import SortedIds, is_converted, number
from megacpp_compile.reader.factors import Axis, Factor, is_one, seen_as, whole_times
from megacpp_compile.reader.index_reads import counts_up, indexed
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import part_of

aten = torch.ops.aten
_CONSTANT = "_tensor_constant"  # what tracing names the tensors that code makes of numbers
_ITEMS = (aten.item.default, aten._local_scalar_dense.default)
_ADDS = (operator.add, aten.add.Tensor, aten.add.Scalar)


def whole_of(node: Node) -> Node | None:
    """What `node` is some of the rows of, which follow one another."""
    if node.target is aten.slice.Tensor:
        return node.args[0] if _dim(node, 1) == 0 and _step(node) == 1 else None  # type: ignore[return-value]
    if node.target is operator.getitem and _sizes(node) is not None:
        return node.args[0].args[0]  # type: ignore[union-attr, return-value]
    return None


def expert_of_part(ids: SortedIds, part: Node) -> int | None:
    """The expert whose slots the rows of `part` are, where those of `whole_of(part)` lie in the order of `ids`."""
    if part.target is aten.slice.Tensor:
        return expert_between(ids, *([*part.args[2:4], None, None][:2]))
    sizes, at = _sizes(part), part.args[1]
    assert sizes is not None and isinstance(at, int)
    counted = [_counted(ids, size) for size in sizes[: at + 1]]
    return at if counted == list(range(at + 1)) else None


def expert_between(ids: SortedIds, start: Any, end: Any) -> int | None:
    """The expert whose slots, sorted, begin at `start` and end at `end`."""
    first, last = before(ids, 0 if start is None else start), before(ids, end)
    return first if first is not None and last == first + 1 else None


def expert_without(ids: SortedIds, none: tuple[Any, ...]) -> int | None:
    """The expert that has no slots wherever `none`, see `none_counted`, are none."""
    count = none[0] if len(none) == 1 or _is_zero(none[1]) else none[1] if _is_zero(none[0]) else None
    if count is not None and (expert := _counted(ids, count)) is not None:
        return expert
    return expert_between(ids, *none) if len(none) == 2 else None


def before(ids: SortedIds, place: Any) -> int | None:
    """The expert at whose first slot `place` is: as many slots as there are of experts with lower numbers."""
    counted, terms = list[int](), [place]
    while terms:
        term = terms.pop()
        if not isinstance(term, Node):
            if type(term) is not int or term != 0:
                return None
            continue
        term = _read(term)
        if term.target is torch.sym_sum:
            terms.extend(term.args[0])  # type: ignore[arg-type]
        elif term.target in _ADDS and len(term.args) == 2 and not term.kwargs:
            terms.extend(term.args)
        elif (expert := _counted(ids, term)) is not None:
            counted.append(expert)
        elif not _is_zero(term):
            entry = _entry(term)
            first = None if entry is None else _begins(ids, *entry)
            if first is None:
                return None
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
    if places.target is aten.cat.default and places.args[1:] in ((), (0,)) and len(places.args[0]) == 2:  # type: ignore[arg-type]
        zero, rest = places.args[0]  # type: ignore[misc]
        one = isinstance(zero, Node) and value(zero).shape == (1,) and _is_zero(zero)
        return number(rest) if one else None
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


def _counted(ids: SortedIds, count: Any) -> int | None:
    """The expert of which `count` is the number of slots."""
    if not isinstance(count, Node):
        return None
    count = _read(count)
    if (entry := _entry(count)) is None:
        return ids.counted_alone(count) if isinstance(value(count), torch.Tensor) else None
    if not isinstance(size := value(entry[0]).shape[0], int):
        return None
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


def _sizes(node: Node) -> list[Any] | None:
    """The sizes by which the tensor is split along its first dimension whose part `node` is."""
    split = node.args[0]
    if not isinstance(split, Node) or split.target is not aten.split_with_sizes.default or [*split.args, 0][2] != 0:
        return None
    return list(split.args[1])  # type: ignore[arg-type]


def _dim(node: Node, at: int) -> int:
    dims = value(node.args[0]).dim()
    return (node.args[at] if len(node.args) > at else 0) % dims  # type: ignore[operator, no-any-return]


def _step(node: Node) -> Any:
    return node.args[4] if len(node.args) > 4 else 1


def tokens_in_order(rows: Node, order: Node, tokens: Any, choices: int) -> Node | None:
    """The `tokens` [T, d] of which `rows` has one for each of `choices`, in `order`."""
    read = _taken(rows)
    if read is None:
        return None
    x, token = read
    if order_of_tokens(token, tokens, choices) is order:
        return x
    return once_a_choice(x, tokens, choices) if token is order else None


def order_of_tokens(token: Node, tokens: Any, choices: int) -> Node | None:
    """The order of slots in which `token` has the numbers of their `tokens`."""
    if (divided := slot_over(token)) is not None:
        return divided[0] if divided[1] == choices else None
    read = _taken(token)
    return read[1] if read is not None and numbers_each_slot(read[0], tokens, choices) else None


def choices_of(token: Node, tokens: Any) -> int | None:
    """How many choices each of `tokens` has, by the numbers `token` of slots' tokens."""
    if (divided := slot_over(token)) is not None:
        return divided[1]
    if _taken(token) is None or is_one(tokens) and is_one(value(token).shape[0]):
        return None
    return whole_times(value(token).shape[0], tokens)


def slot_over(node: Node) -> tuple[Node, int] | None:
    """(numbers, number) where `node` is the whole part of the ones over the other."""
    whole = node.target is aten.floor_divide.default or (
        node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") in ("floor", "trunc")
    )
    numbers, over = node.args if whole else (None, None)
    return (numbers, over) if isinstance(numbers, Node) and isinstance(over, int) else None


def numbers_each_slot(numbers: Node, tokens: Any, choices: int) -> bool:
    """Whether `numbers` has the number of each slot's token, in the slots' own order."""
    if (divided := slot_over(numbers)) is not None:
        return divided[1] == choices and counts_up(divided[0])
    each = _repeated(numbers, tokens, choices)
    return each is not None and counts_up(each)


def once_a_choice(rows: Node, tokens: Any, choices: int) -> Node | None:
    """The `tokens` [T, d] of which `rows` has each one `choices` times, one behind the other."""
    read = _taken(rows)
    if read is not None and numbers_each_slot(read[1], tokens, choices):
        return read[0]
    return _repeated(rows, tokens, choices)


def _repeated(rows: Node, tokens: Any, choices: int) -> Node | None:
    """What has one row for each of `tokens`, of which `rows` is a repetition of each `choices` times by views."""
    t, k, *rest = (() if is_one(n) else (Axis(n),) for n in (tokens, choices, *value(rows).shape[1:]))
    seen = seen_as(Factor(rows, ((*t, *k), *rest), rows), (t, *rest))
    return None if seen is None else seen[0]


def _taken(node: Node) -> tuple[Node, Node] | None:
    """(rows, numbers) where `node` is `rows[numbers]`."""
    read = indexed(node)
    if read is None or len(read[1]) != 1 or not isinstance(read[1][0], Node):
        return None
    return read[0], read[1][0]
