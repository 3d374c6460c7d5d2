"""Matches sums of rows whose numbers count up, over and over: what is added by `arange(T).expand(E, -1).reshape(-1)` is
a sum over E. `factors` has reads by such numbers, which are repetitions."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.matchers.moe.factors import Axis, Dims, Factor, beneath, is_one
from megacpp_compile.matchers.moe.index_reads import SCATTERS, added_rows, adds, counts_up

aten = torch.ops.aten


def added_to_every(node: Node) -> tuple[Node | None, Node, Dims, Dims] | None:
    """(base, None for zeros; rows; the dimensions of `node`; those of the rows) where `node` adds rows to every row of
    the base, as often to one as to any other."""
    if (found := _added(node)) is None:
        return None
    base, numbers, rows = found
    count, times = value(base).shape[0], whole_times(value(rows).shape[0], value(base).shape[0])
    if times is None:
        return None
    t, e, c = (() if is_one(n) else (Axis(n),) for n in (count, times, value(rows).shape[1]))
    for order in ((*e, *t), (*t, *e)):
        dims = (order, c)
        *_, (last, seen) = beneath(Factor(numbers, dims[: value(numbers).dim()], numbers))
        if counts_up(last) and seen == (t,) and same_size(value(last).shape[0], count):
            return (None if is_filled(base, 0.0) else base), rows, (t, c), dims
    return None


def _added(node: Node) -> tuple[Node, Node, Node] | None:
    """(base [T, d], numbers [R] or [R, d] of rows, rows [R, d]) where `node` adds these to those of the base."""
    if (found := added_rows(node)) is not None:
        base, numbers, rows = found
    elif node.target in SCATTERS and node.args[1] == 0 and adds(node, to_zeros=True):
        base, _, numbers, rows = node.args[:4]  # type: ignore[assignment]
        if not all(map(same_size, value(numbers).shape, value(rows).shape)):
            return None
    else:
        return None
    plain = value(base).dim() == value(rows).dim() == 2 and value(numbers).dtype in (torch.int64, torch.int32)
    return (base, numbers, rows) if plain and same_size(value(base).shape[1], value(rows).shape[1]) else None


def whole_times(rows: Any, tokens: Any) -> int | None:
    """How many times `tokens` the number `rows` is; None where that is no fixed whole number."""
    if isinstance(tokens, int) and not tokens:
        return None
    times = rows // tokens
    fixed = times if isinstance(times, int) else int(times.node.expr) if times.node.expr.is_Integer else None
    return fixed if fixed and same_size(tokens * fixed, rows) else None
