"""Rows of tokens, one for each choice, in an order of slots: what sorted experts read, and where they add to.

Slot s is choice s % k of token s // k. In the order `o` of slots, tokens' rows are `x[o // k]`, `x[token[o]]` or
`x[token][o]`, with `token` the number of each slot's token, or `every_choice(x)[o]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers.moe.counted_rows import whole_times
from megacpp_compile.matchers.moe.factors import Axis, Factor, is_one, seen_as
from megacpp_compile.matchers.moe.index_reads import counts_up, indexed

aten = torch.ops.aten


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
