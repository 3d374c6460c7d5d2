"""Index tensors by which an expert takes its rows: tokens', or those of slots, a token's choices one after the other.

`nonzero` of a mask, a mask itself, and numbers that are read at such places or computed from them: with `token` the
number of each slot's token, `token[ids == e]` and `nonzero(ids == e) // k` are the tokens that `where(indices == e)`
gives. Slot s is choice s % k of token s // k. In the order `o` of slots, tokens' rows are `x[o // k]`, `x[token[o]]` or
`x[token][o]`, or `every_choice(x)[o]`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, same_sizes, value
from megacpp_compile.matchers.moe.gate_matrix import match_chosen, match_chosen_gate, match_column
from megacpp_compile.matchers.moe.routing import Above, Mask, distinct_choices, match_mask
from megacpp_compile.matchers.moe.sorted_slots import (
    SortedIds,
    expert_of_part,
    slots,
    sorted_by,
    whole_of,
)
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.factors import Axis, Factor, is_one, seen_as, whole_times
from megacpp_compile.reader.index_reads import counts_up, indexed, row_read
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import column_of

_SQUEEZES = (aten.squeeze.dim, aten.squeeze.default, *RESHAPES)
_FINDS_COLUMNS = (aten.where.default, aten.nonzero_numpy.default)


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """An index tensor of the places where `mask` holds.

    Attributes:
        of: what it numbers: a dimension of the mask; "slot", tokens and their choices in one; "" where it is the mask.
    """

    mask: Mask
    of: str


def match_rows(node: Any) -> ExpertRows | None:
    """The places of a mask over tokens, or over slots, that `node` is."""
    if isinstance(node, ExpertRows):
        return node
    if not isinstance(node, Node) or node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return None
    if value(node).dtype is torch.bool:
        mask = mask_of(node)
        return ExpertRows(mask, "") if mask is not None and "s" not in mask.dims else None
    found, column = node, 0
    targets: tuple[Any, ...] = (aten.nonzero.default,)
    if node.target in _SQUEEZES:
        found = node.args[0]  # type: ignore[assignment]
        if value(node).dim() != 1:
            return None
    elif (one := column_of(node)) is not None:
        found, column = one
    elif node.target is operator.getitem:
        (found, column), targets = node.args, _FINDS_COLUMNS  # type: ignore[assignment]
    else:
        return _of_slots(node)
    if not isinstance(found, Node) or found.target not in targets or not isinstance(column, int):
        return _of_slots(node)
    mask = mask_of(found.args[0])
    if mask is None or node.target in _SQUEEZES and len(mask.dims) != 1:
        return None
    return ExpertRows(mask, mask.dims[column % len(mask.dims)])


def mask_of(node: Any) -> Mask | None:
    """The mask of one expert that `node` is, or where its gate is not zero."""
    mask = match_mask(node)
    if mask is None:
        return _where_gated(node)
    return mask if mask.expert is not None else None


def _where_gated(node: Node) -> Mask | None:
    """The mask of the tokens whose gate for an expert is above zero, or is not zero."""
    above = node.target is aten.gt.Scalar
    gate: Any = node
    if node.target in (aten.gt.Scalar, aten.ne.Scalar):
        gate = node.args[0] if node.args[1] == 0 else None
    elif node.target in (aten._to_copy.default, aten.to.dtype) and value(node).dtype is torch.bool:
        gate = node.args[0]
    if not isinstance(gate, Node) or not isinstance(value(gate), torch.Tensor) or not value(gate).is_floating_point():
        return None
    if (column := match_column(gate)) is not None and (chosen := match_chosen(column[0])) is not None:
        indices, gates, expert = chosen.indices, Above(column[0], True, above), column[1]
    elif (own := match_chosen_gate(gate)) is not None and distinct_choices(own[0]):
        indices, gates, expert = own[0], Above(own[1], False, above), own[2]
    else:
        return None
    n = value(gate).dim()
    same = n == value(indices).dim() - 1 and all(map(same_size, value(gate).shape, value(indices).shape))
    return Mask(indices, tuple("tuv"[:n]), expert, any=True, above=gates) if same and 0 < n < 4 else None


def _of_slots(node: Node) -> ExpertRows | None:
    """The tokens of the slots that a mask over slots gives, or an expert's part of the sorted slots."""
    if (whole := whole_of(node)) is not None:
        return _of_part(node, whole)
    if (divided := slot_over(node)) is not None:
        rows = by_slot(match_rows(divided[0]))
        whole = rows is not None and same_size(divided[1], choices_of(rows.mask))
        return ExpertRows(rows.mask, "t") if rows is not None and whole else None
    read = row_read(node)
    rows = None if read is None else by_slot(match_rows(read[1]))
    if read is None or rows is None or not numbers_each_slot(read[0], tokens_of(rows.mask), choices_of(rows.mask)):
        return None
    return ExpertRows(rows.mask, "t")


def _of_part(part: Node, numbers: Node) -> ExpertRows | None:
    """An expert's part of the `numbers` of slots, or of their tokens, in the order of experts."""
    order = order_of(numbers)
    ids = None if order is None else sorted_by(order)
    if ids is None or (expert := expert_of_part(ids, part)) is None:
        return None
    mask = in_order(ids, expert)
    if numbers is order:
        return ExpertRows(mask, mask.dims[-1] if len(mask.dims) == 1 else "slot")
    if len(mask.dims) == 1 or not isinstance(choices_of(mask), int):
        return None
    return ExpertRows(mask, "t") if order_of_tokens(numbers, tokens_of(mask), choices_of(mask)) is order else None


def order_of(numbers: Node) -> Node | None:
    """The order of experts in which `numbers`, which may be those of slots' tokens, come."""
    return next((n for n in (numbers, *numbers.all_input_nodes) if sorted_by(n) is not None), None)


def in_order(ids: SortedIds, expert: int) -> Mask:
    """The mask of `expert` over slots that come in the order of experts."""
    indices = slots(ids.ids)
    return Mask(indices, ("t",) if value(indices).dim() == 1 else ("t", "s"), expert, order=ids.order)


def read_at(node: Node, whole: Node | None = None) -> tuple[Node, list[Any]] | None:
    """(tensor, its leading indices) of a read by index tensors, or of a part of what was read so; see `ExpertRows`.
    With `whole` of the same part of that as `node` is of another tensor."""
    read = indexed(node) if whole is None else None
    if read is None and whole is None:
        whole = whole_of(node)
    whole = through(whole, lambda n: n is not None and is_cast(n))
    inner = row_read(whole) if whole is not None else None
    if inner is None:
        return read
    rows = _of_part(node, inner[1])
    return None if rows is None else (inner[0], [rows])


@or_none
def by_slot(rows: ExpertRows | None) -> ExpertRows | None:
    """`rows` of choices in one dimension as slots of tokens, where that is what these choices are."""
    if rows is None or rows.of == "slot":
        return rows
    mask, indices = rows.mask, rows.mask.indices
    indices = through(indices, lambda n: n.target in RESHAPES and value(n).dim() == 1)
    NoMatch.when(mask.dims != ("t",) or mask.any or mask.choice is not None or value(indices).dim() < 2)
    NoMatch.when(not isinstance(value(indices).shape[-1], int))
    return ExpertRows(Mask(indices, ("t", "s"), mask.expert), "slot")


def at_slots(positions: list[Any], mask: Mask) -> bool:
    """Whether `positions` is one index tensor, of the slots of `mask`."""
    rows = by_slot(match_rows(positions[0])) if len(positions) == 1 else None
    return rows is not None and rows.mask == mask


def tokens_of(mask: Mask) -> Any:
    """How many tokens there are, each with as many choices as the last dimension of the indices has entries."""
    return math.prod(value(mask.indices).shape[:-1])


def choices_of(mask: Mask) -> Any:
    return value(mask.indices).shape[-1]


@or_none
def picked(positions: list[Any], slots: bool = False) -> Mask | None:
    """The mask over tokens, or if `slots` over their choices, with one dimension for all tokens, of whose true entries
    `positions` are all the index tensors, in order, or the mask itself."""
    rows = [match_rows(p) for p in positions]
    NoMatch.when(not rows or any(r is None or r.mask != rows[0].mask for r in rows))  # type: ignore[union-attr]
    mask = rows[0].mask  # type: ignore[union-attr]
    wanted, given = [*sorted(mask.tokens), *(["s"] if slots else [])], [r.of for r in rows]  # type: ignore[union-attr]
    NoMatch.when(given not in ([""], wanted))
    return mask.flat() if "".join(sorted(mask.tokens)) in "".join(mask.dims) else None


def read_by(positions: list[Any]) -> int:
    """The number of dimensions that `positions` index."""
    return sum(value(p).dim() if isinstance(p, Node) and value(p).dtype is torch.bool else 1 for p in positions)


def read_over(tensor: Node, positions: list[Any], indices: Node, choices: bool) -> bool:
    """Whether the dimensions of `tensor` that `positions` index are the tokens of `indices`, as they are or in one.

    choices: the last dimension of `indices` is a token's choices.
    """
    outer, tokens = value(tensor).shape[: read_by(positions)], value(indices).shape
    tokens = tokens[:-1] if choices else tokens
    if len(outer) == 1 < len(tokens):
        return same_size(outer[0], math.prod(tokens))
    return same_sizes(outer, tokens)


def unread(node: Node, mask: Mask) -> Node | None:
    """What `node` is the rows of `mask` of."""
    node = through(node, is_cast)
    read = read_at(node)
    if read is None or picked(read[1]) != mask:
        return None
    return read[0] if read_over(read[0], read[1], mask.indices, has_choices(mask)) else None


def has_choices(mask: Mask) -> bool:
    """Whether the last dimension of the mask's indices is a token's choices."""
    return mask.choice is not None or mask.any or "s" in mask.dims


@or_none
def tokens_in_order(rows: Node, order: Node, tokens: Any, choices: int) -> Node | None:
    """The `tokens` [T, d] of which `rows` has one for each of `choices`, in `order`."""
    read = NoMatch.unless(row_read(rows))
    x, token = read
    if order_of_tokens(token, tokens, choices) is order:
        return x
    return once_a_choice(x, tokens, choices) if token is order else None


def order_of_tokens(token: Node, tokens: Any, choices: int) -> Node | None:
    """The order of slots in which `token` has the numbers of their `tokens`."""
    if (divided := slot_over(token)) is not None:
        return divided[0] if divided[1] == choices else None
    read = row_read(token)
    return read[1] if read is not None and numbers_each_slot(read[0], tokens, choices) else None


def choices_numbered(token: Node, tokens: Any) -> int | None:
    """How many choices each of `tokens` has, by the numbers `token` of slots' tokens."""
    if (divided := slot_over(token)) is not None:
        return divided[1]
    if row_read(token) is None or is_one(tokens) and is_one(value(token).shape[0]):
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
    read = row_read(rows)
    if read is not None and numbers_each_slot(read[1], tokens, choices):
        return read[0]
    return _repeated(rows, tokens, choices)


def _repeated(rows: Node, tokens: Any, choices: int) -> Node | None:
    """What has one row for each of `tokens`, of which `rows` is a repetition of each `choices` times by views."""
    t, k, *rest = (() if is_one(n) else (Axis(n),) for n in (tokens, choices, *value(rows).shape[1:]))
    seen = seen_as(Factor(rows, ((*t, *k), *rest), rows), (t, *rest))
    return None if seen is None else seen[0]
