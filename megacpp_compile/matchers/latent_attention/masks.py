"""Which rows a query sees by a mask: all up to some last one, told by what the mask compares.

Every integer that a mask is made of is read as a sum (`integers`). A comparison of two of them says up to which row a
query sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import NEGATIONS
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import EXPANSIONS, IDENTITIES
from megacpp_compile.matchers.latent_attention.core import Core, constant, is_low
from megacpp_compile.matchers.latent_attention.integers import (
    BY_NUMBER,
    DATA,
    DTYPES,
    NotRows,
    Sum,
    always,
    is_through,
    number_of,
    sum_of,
    viewed,
)
from megacpp_compile.matchers.ssd.packed import alike
from megacpp_compile.reader.links import through


@dataclasses.dataclass(frozen=True)
class Seen:
    """Up to which row a query sees: query i up to `last` (+ i where it `moves`)."""

    last: Sum
    moves: bool


@dataclasses.dataclass(frozen=True)
class SeenRows:
    """Which rows are seen, the same by all queries, as data: `node`, of bool, is broadcast to the scores. hidden: what
    it says is the contrary."""

    node: Node
    hidden: bool


def rows_seen(core: Core, tokens: Any) -> tuple[list[Seen], list[SeenRows]]:
    """What the masks of `core` let a query see, each of them; none where it sees all rows. Raises NotRows."""
    parts = [part for mask in core.masks for part in _parts(mask.node, mask.kind)]
    limits, given = list[Seen](), list[SeenRows]()
    for part in parts:
        try:
            limits += [_limit(limit, core) for limit in (part if isinstance(part, list) else limits_of(*part))]
        except NotRows:
            if isinstance(part, list) or not _of_rows(part[0], core):
                raise
            given.append(SeenRows(*part))
    if core.causal:
        limits.append(Seen(Sum(()), True))
    return _least(limits, tokens), given


def _limit(limit: Sum, core: Core) -> Seen:
    return last_row(
        dict(zip(core.scores_axes, limit.over(len(core.scores_axes)), strict=True)), limit
    )


def last_row(steps: Mapping[str, int], limit: Sum) -> Seen:
    """What a sum that is at most 0 where a row is seen says, with its steps by axis. Raises NotRows."""
    NotRows.when(
        steps.get("t") == DATA,
        "it goes by positions of the new tokens that are data, and may be any: make them start + arange",
    )
    NotRows.when(DATA in (steps.get("s"), steps.get("h")), "it is data")
    NotRows.when(
        steps.get("s") != 1 or steps.get("b", 0) not in (0, DATA) or steps.get("h") or steps.get("t", 0) not in (0, -1),
        "it hides other rows than those behind a last one",
    )
    return Seen(-Sum((), limit.number, limit.parts), steps.get("t", 0) == -1)


def _of_rows(node: Node, core: Core) -> bool:
    """Whether `node` is of bool and the same for all queries and heads."""
    fake = value(node)
    if not isinstance(fake, torch.Tensor) or fake.dtype != torch.bool:
        return False
    axes = core.scores_axes[len(core.scores_axes) - fake.dim() :]
    return all(same_size(n, 1) for axis, n in zip(axes, fake.shape, strict=True) if axis in "ht")


# Sums that are at most 0 where a row is seen, or (condition, whether it says what is hidden).
_Limits = list[Sum] | tuple[Node, bool]


def _parts(node: Node, kind: str) -> list[_Limits]:
    return added(node) if kind == "added" else conditions(node, kind == "hidden")


def conditions(node: Node, hidden: bool) -> list[_Limits]:
    """The parts of a condition that all have to hold."""
    if (truth := truth_of(node)) is not None:
        parts = conditions(truth[0], hidden != truth[1])
        return parts if all(isinstance(p, list) or _is_bool(p[0]) or _is_read(*p) for p in parts) else [(node, hidden)]
    both = [n for n in node.args[:2] if isinstance(n, Node)] if node.target in (OR if hidden else AND) else []
    if len(both) == 2 and all(map(_is_bool, both)):
        return [part for n in both for part in conditions(n, hidden)]
    if node.target in EXPANSIONS | IDENTITIES:  # what is broadcast once more
        return conditions(node.args[0], hidden)  # type: ignore[arg-type]
    if constant(node) == (0 if hidden else 1) or always(node) is not hidden and always(node) is not None:
        return []
    return [(node, hidden)]


def _is_bool(node: Node) -> bool:
    return bool(value(node).dtype == torch.bool)


def _is_read(node: Node, hidden: bool) -> bool:
    try:
        return bool(limits_of(node, hidden))
    except NotRows:
        return False


def truth_of(node: Node) -> tuple[Node, bool] | None:
    """(of 0s and 1s, whether `node` holds where they are 0 and not where they are 1); None where it is none of such."""
    target, args = node.target, node.args
    if target in NEGATIONS and is_flags(args[0]):
        return (args[0], True) if target is aten.logical_not.default or _is_bool(args[0]) else None  # type: ignore[arg-type,return-value]
    if target in BY_NUMBER and is_flags(args[0]) and (number := constant(args[1])) is not None:
        at = [BY_NUMBER[target](n, number) for n in (0, 1)]  # type: ignore[index]
        return None if at[0] == at[1] else (args[0], at[0])  # type: ignore[return-value]
    if target is aten.rsub.Scalar and args[1] == 1 and is_flags(args[0]):
        return args[0], True  # type: ignore[return-value]
    if target is aten.sub.Tensor and not node.kwargs and constant(args[0]) == 1 and is_flags(args[1]):
        return args[1], True  # type: ignore[return-value]
    return (args[0], False) if target in DTYPES and is_flags(args[0]) else None  # type: ignore[return-value]


def _is_ones(node: Any) -> bool:
    node = through(node, DTYPES)
    return constant(node) == 1


def is_flags(node: Any) -> bool:
    """Whether all elements of `node` are 0 or 1."""
    if not isinstance(node, Node) or not isinstance(value(node), torch.Tensor):
        return False
    if _is_bool(node) or constant(node) in (0, 1):
        return True
    if node.target in (aten.tril.default, aten.triu.default) or is_through(node):
        return is_flags(node.args[0])
    if node.target is aten.mul.Tensor:
        return all(map(is_flags, node.args))
    return node.target in (aten.rsub.Scalar, aten.sub.Tensor) and truth_of(node) is not None


def by_flags(node: Node) -> tuple[Node, Any, Node, float] | None:
    """(the product, scores, flags, the number in the place of scores whose flag is 0) of `s * m - 1e10 * (1 - m)`, m of
    0s and 1s."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
        return None
    sign = 1 if node.target is aten.add.Tensor else -1
    for kept, rest in (node.args, node.args[::-1])[: 2 if sign == 1 else 1]:
        if any(getattr(n, "target", None) is not aten.mul.Tensor for n in (kept, rest)):
            continue
        number, (of_zeros, left) = constant(rest.args[1]), truth_of(rest.args[0]) or (None, False)  # type: ignore[union-attr]
        if number is None or sign * number >= 0 or not left:
            continue
        for of, flags in (kept.args, kept.args[::-1]):  # type: ignore[union-attr]
            if is_flags(flags) and alike(flags, of_zeros):
                return kept, of, flags, sign * number
    return None


def _least(found: list[Seen], tokens: Any) -> list[Seen]:
    """`found` without those that hide nothing which another does not."""
    if same_size(tokens, 1):
        found = [dataclasses.replace(one, moves=True) for one in found]
    left = list[Seen]()
    for one in found:
        for other in found:
            gap = one.last + -other.last
            if one is other or gap.parts:
                continue
            more = gap.number
            if one.moves == other.moves and (more > 0 or more == 0 and found.index(one) > found.index(other)):
                break
            if not one.moves and other.moves and isinstance(tokens, int) and more >= tokens - 1:
                break
        else:
            left.append(one)
    NotRows.when(len({one.moves for one in left}) > 1, "one part of it moves with the query, and another does not")
    return left


def added(node: Node) -> list[_Limits]:
    """Of a mask that is 0 or so low that nothing is left."""
    if node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
        condition, a, b = node.args
        if constant(a) == 0 and is_low(b):
            return conditions(condition, False)  # type: ignore[arg-type]
        if constant(b) == 0 and is_low(a):
            return conditions(condition, True)  # type: ignore[arg-type]
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        if constant(node.args[0]) == 0 and is_low(node.args[2]):
            return conditions(node.args[1], True)  # type: ignore[arg-type]
        if is_low(node.args[0]) and constant(node.args[2]) == 0:
            return conditions(node.args[1], False)  # type: ignore[arg-type]
    if node.target is aten.mul.Tensor and is_flags(node.args[0]) and is_low(node.args[1]):
        if constant(node.args[1]) != float("-inf"):  # times 0
            return conditions(node.args[0], True)  # type: ignore[arg-type]
    if node.target is aten.log.default and is_flags(node.args[0]):
        return conditions(node.args[0], False)  # type: ignore[arg-type]
    if node.target is aten.triu.default and is_low(node.args[0]):
        return [[beside_diagonal(node).plus(1)]]
    if node.target in EXPANSIONS | IDENTITIES or node.target in DTYPES:
        return added(node.args[0])  # type: ignore[arg-type]
    if is_through(node):
        parts = [part if isinstance(part, list) else limits_of(*part) for part in added(node.args[0])]  # type: ignore[arg-type]
        return [viewed(node, part) for part in parts]
    raise NotRows("it is data")


def beside_diagonal(node: Node) -> Sum:
    """column - row - diagonal of a `triu` or `tril`."""
    diagonal = node.args[1] if len(node.args) > 1 else 0
    rank = value(node).dim()
    return Sum((0,) * (rank - 2) + (-1, 1)) + number_of(diagonal, -1)


def limits_of(node: Any, hidden: bool) -> list[Sum]:
    """Of a condition, under which rows are seen, or `hidden`."""
    NotRows.when(not isinstance(node, Node), "it is data")
    target = node.target
    if (truth := truth_of(node)) is not None:
        return limits_of(truth[0], hidden != truth[1])
    joined = OR if hidden else AND
    if target in joined:
        return [limit for x in node.args[:2] for limit in limits_of(x, hidden)]
    if target in _COMPARISONS:
        sign, more = _COMPARISONS[target]
        a, b = (sum_of(x) for x in node.args[:2])
        limit = (a + -b if sign > 0 else b + -a).plus(more)
        return [(-limit).plus(1) if hidden else limit]
    if target in (aten.tril.default, aten.triu.default):
        limit = beside_diagonal(node) if target is aten.tril.default else -beside_diagonal(node)
        if _is_ones(node.args[0]):
            return [(-limit).plus(1) if hidden else limit]
        if is_flags(node.args[0]) and not hidden:
            return [limit, *limits_of(node.args[0], False)]
    if is_through(node):
        return viewed(node, limits_of(node.args[0], hidden))
    raise NotRows("it is data")


AND = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.mul.Tensor)
OR = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor)
# Comparison -> (a - b or b - a, the number added) that is at most 0 where it holds.
_COMPARISONS = {
    aten.le.Tensor: (1, 0), aten.le.Scalar: (1, 0), aten.lt.Tensor: (1, 1), aten.lt.Scalar: (1, 1),
    aten.ge.Tensor: (-1, 0), aten.ge.Scalar: (-1, 0), aten.gt.Tensor: (-1, 1), aten.gt.Scalar: (-1, 1),
}  # fmt: skip
