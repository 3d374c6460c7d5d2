"""Losses of rows that nothing is done with but to add them up, each times what it counts for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import FILLS
from megacpp_compile.fx.edit import same_shape, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.size_checks import mask_of
from megacpp_compile.fx.views import RESHAPES, UNIT_DIMS, is_cast, is_identity
from megacpp_compile.matchers.linear_cross_entropy.logits import factor_of
from megacpp_compile.matchers.linear_cross_entropy.reads import Read, Weight
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.reader.dims import reduced_dims

_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)


def summed(read: Read, has_gradient: Callable[[Node], bool]) -> Read:
    """`read`, or the sum (reduction "sum") or mean over all rows ("rows") that is all it is read for, with the tensors
    without a gradient that rows are multiplied by as `weights`."""
    if read.reduction != "none" or read.exp or read.kind not in ("loss", "log-probability"):
        return read
    node, factor, chosen = read.node, 1.0 if read.kind == "loss" else -1.0, None
    weights, through = list[Weight](), [read.node]
    kinds = set[str]()  # of the sums over part of the dimensions so far
    while len(node.users) == 1:
        (user,) = node.users
        through.append(user)
        reduction = _reduces(user, node)
        if user.target is aten.dot.default and not kinds and (other := _other(node, user)) is not None:
            if chosen is not None or has_gradient(other):
                break
            reduction = "sum"
            weights.append(Weight(other))
        if reduction is not None and kinds <= {reduction}:
            logits = dataclasses.replace(read.logits, sign=read.logits.sign * factor)
            return dataclasses.replace(
                read, kind="loss", node=user, logits=logits, reduction=reduction, weights=tuple(weights),
                chosen=chosen, through=(*read.through, *through[:-1]),
            )  # fmt: skip
        if (number := factor_of(node, user)) is not None:
            factor *= number
        elif (kind := _of_some_dims(user, node)) is not None and chosen is None:
            kinds.add(kind)
        elif kinds or chosen is not None:
            if not _same_rows(user):
                break
        elif (weight := _weight(node, user, has_gradient)) is not None:
            weights.append(weight)
        elif (mask := _chosen_by(node, user)) is not None:
            weights, chosen = [*weights, Weight(mask)], mask
        elif not _same_rows(user):
            break
        node = user
    return read


def _reduces(user: Node, node: Node) -> str | None:
    if user.target in (aten.sum.dim_IntList, aten.mean.dim):
        dims, keep = reduced_dims(user)
        if len({*dims}) != value(node).dim() or keep:
            return None
    elif user.target not in (aten.sum.default, aten.mean.default):
        return None
    return "sum" if user.target in _SUMS else "rows"


def _of_some_dims(user: Node, node: Node) -> str | None:
    """As `_reduces`, of a sum or mean over some of the dimensions, which another follows."""
    if user.target not in (aten.sum.dim_IntList, aten.mean.dim) or user.args[0] is not node or not user.args[1]:
        return None
    return "sum" if user.target in _SUMS else "rows"


@or_none
def _weight(node: Node, user: Node, has_gradient: Callable[[Node], bool]) -> Weight | None:
    """The tensor, an element a row and without a gradient, that `user` multiplies `node` by; a mask, where it puts
    zeros."""
    if user.target in FILLS and user.args[0] is node and number_of(user.args[2]) == 0:
        mask: Node = user.args[1]  # type: ignore[assignment]
        return Weight(mask, unless=True) if same_shape(mask, node) else None
    if user.target in _WHERES:
        mask, first, second = user.args  # type: ignore[assignment]
        NoMatch.when(not same_shape(mask, node) or not same_shape(user, node))
        if first is node and _is_zero(second):
            return Weight(mask)
        return Weight(mask, unless=True) if second is node and _is_zero(first) else None
    NoMatch.when(user.target is not aten.mul.Tensor or (other := _other(node, user)) is None or has_gradient(other))
    fake = value(other)
    NoMatch.when(fake.is_complex() or not same_shape(user, node))
    if same_shape(other, node):
        return Weight(other)
    return Weight(other, shape=tuple(value(node).shape)) if _repeats(other, node) else None


def _other(node: Node, user: Node) -> Node | None:
    """The other of the two tensors that `user` reads."""
    if len(user.all_input_nodes) != 2 or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    return other if isinstance(value(other), torch.Tensor) else None  # type: ignore[return-value]


def _chosen_by(node: Node, user: Node) -> Node | None:
    """The mask that `user` chooses rows by, all of whose dimensions it has."""
    if user.target is aten.masked_select.default and user.args[0] is node:
        mask: Node | None = user.args[1]  # type: ignore[assignment]
    else:
        mask = mask_of(user) if user.args[0] is node else None
    return mask if mask is not None and same_shape(mask, node) else None


def _is_zero(given: Any) -> bool:
    """Whether `given` is the number 0, or a tensor of it."""
    if number_of(given) == 0:
        return True
    return isinstance(given, Node) and is_filled(given, 0.0)


def _repeats(node: Node, rows: Node) -> bool:
    """Whether `node` has one element for several rows, of which it is known how many there are."""
    here, there = value(node).shape, value(rows).shape
    if len(here) > len(there) or not all(isinstance(n, int) for n in (*here, *there)):
        return False
    return all(a in (1, b) for a, b in zip(reversed(here), reversed(there), strict=False))


def _same_rows(user: Node) -> bool:
    return is_identity(user) or is_cast(user) or user.target in RESHAPES or user.target in UNIT_DIMS
