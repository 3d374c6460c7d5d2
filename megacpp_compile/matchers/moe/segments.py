"""Matches a buffer of experts' outputs in the order of experts: their concatenation, or each written to its part."""

from __future__ import annotations

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_blank
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.moe.group_ends import SortedIds, sorted_by
from megacpp_compile.matchers.moe.row_updates import RowUpdate
from megacpp_compile.matchers.moe.rows import in_order
from megacpp_compile.matchers.moe.slot_parts import expert_between
from megacpp_compile.reader.links import through

aten = torch.ops.aten


def segments(node: Node, order: Node) -> list[RowUpdate]:
    """Every expert's outputs that `node` holds in `order`, which the experts' rows have to be checked against; none
    where it holds something else."""
    ids = sorted_by(order)
    node = strip_row_views(node)
    if ids is None:
        return []
    return _joined(node, ids) if node.target is aten.cat.default else _written(node, ids)


def _joined(node: Node, ids: SortedIds) -> list[RowUpdate]:
    """The parts of the concatenation `node`, one for each expert."""
    parts, *dim = node.args
    if dim not in ([], [0]):
        return []
    return [_write(part, part, ids, expert, part) for expert, part in enumerate(parts)]  # type: ignore[arg-type]


def _written(node: Node, ids: SortedIds) -> list[RowUpdate]:
    """The writes to parts of `node`."""
    updates: list[RowUpdate] = []
    while node.target is aten.slice_scatter.default:
        previous, added, *where = node.args
        dim, start, end, step = where + [0, None, None, 1][len(where) :]  # type: ignore[list-item]
        expert = expert_between(ids, start, end) if (dim, step) == (0, 1) else None
        if expert is None:
            return []
        updates.insert(0, _write(node, previous, ids, expert, _own(added)))  # type: ignore[arg-type]
        node = previous  # type: ignore[assignment]
    return updates if is_blank(node) else []


def _write(node: Node, previous: Node, ids: SortedIds, expert: int, added: Node) -> RowUpdate:
    token = in_order(ids, expert)
    return RowUpdate(node, previous, token, added, overwrites=True, by_slot="s" in token.dims)


def _own(added: Node) -> Node:
    """`added` before it takes the number of rows of the part, which an expert's outputs have in any case."""
    return through(added, _expands_rows)


def _expands_rows(node: Node) -> bool:
    if node.target is not aten.expand.default:
        return False
    shape, own = value(node).shape, value(node.args[0]).shape
    return len(own) == len(shape) and all(map(same_size, own[1:], shape[1:]))
