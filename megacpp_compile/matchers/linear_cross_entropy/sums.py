"""Losses of rows that nothing is done with but to add them up, each times what it counts for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import RESHAPES, UNIT_DIMS, is_cast, is_identity
from megacpp_compile.matchers.linear_cross_entropy.logits import factor_of
from megacpp_compile.matchers.linear_cross_entropy.reads import Read

aten = torch.ops.aten


def summed(read: Read, has_gradient: Callable[[Node], bool]) -> Read:
    """`read`, or the sum (reduction "sum") or mean over all rows ("rows") that is all it is read for, with the tensors
    without a gradient that rows are multiplied by as `weights`."""
    if read.reduction != "none" or read.kind not in ("loss", "log-probability"):
        return read
    node, factor = read.node, 1.0 if read.kind == "loss" else -1.0
    weights, through = list[Node](), [read.node]
    while len(node.users) == 1:
        (user,) = node.users
        through.append(user)
        if (reduction := _reduces(user, node)) is not None:
            logits = dataclasses.replace(read.logits, sign=read.logits.sign * factor)
            return dataclasses.replace(read, kind="loss", node=user, logits=logits, reduction=reduction,
                                       weights=tuple(weights), through=(*read.through, *through[:-1]))  # fmt: skip
        if (number := factor_of(node, user)) is not None:
            factor *= number
        elif (weight := _weight(node, user, has_gradient)) is not None:
            weights.append(weight)
        elif not _same_rows(user):
            break
        node = user
    return read


def _reduces(user: Node, node: Node) -> str | None:
    given: list[Any] = [*user.args[1:], None]
    if user.target in (aten.sum.dim_IntList, aten.mean.dim):
        dims = given[0] if given[0] is not None else range(value(node).dim())
        if {d % value(node).dim() for d in dims} != set(range(value(node).dim())) or True in user.args[2:]:
            return None
    elif user.target not in (aten.sum.default, aten.mean.default):
        return None
    return "sum" if user.target in (aten.sum.default, aten.sum.dim_IntList) else "rows"


def _weight(node: Node, user: Node, has_gradient: Callable[[Node], bool]) -> Node | None:
    """The tensor, an element a row and without a gradient, that `user` multiplies `node` by."""
    if user.target is not aten.mul.Tensor or len(user.all_input_nodes) != 2:
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    fake, rows = value(other), value(node)
    if not isinstance(fake, torch.Tensor) or fake.is_complex() or has_gradient(other):  # type: ignore[arg-type]
        return None
    same = fake.dim() == rows.dim() and all(map(same_size, fake.shape, rows.shape))
    return other if same else None  # type: ignore[return-value]


def _same_rows(user: Node) -> bool:
    return is_identity(user) or is_cast(user) or user.target in RESHAPES or user.target in UNIT_DIMS
