"""What an expert's rows are weighted by: the gate of each row's choice, however it is read.

`gates[token, choice]`, `gates[mask]` of a mask over choices, `gates.flatten()[slots]`, a column of a matrix of gates,
the sum of a token's gates that are the expert's own, read before the sum or after it; and the gates of all rows in the
order of experts, which may multiply these before an expert's part is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.views import COPIES
from megacpp_compile.matchers._match import or_failure, refuse, refuse_if
from megacpp_compile.matchers.moe.gate_matrix import before_casts, match_chosen_gate
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.moe.routing import Mask, distinct_choices, match_mask, one_choice, scores_of
from megacpp_compile.matchers.moe.rows import (
    at_slots,
    has_choices,
    order_of,
    picked,
    read_at,
    read_by,
    read_over,
    unread,
)
from megacpp_compile.matchers.moe.sorted_slots import whole_of
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.index_reads import row_read
from megacpp_compile.reader.links import through
from megacpp_compile.reader.products import multiplied

_COLUMNS = (
    aten.unsqueeze.default, aten.squeeze.dim, *RESHAPES, aten._to_copy.default, aten.to.dtype, aten.clone.default,
)  # fmt: skip
Gates = tuple[Node, bool]  # [.., k], one for each choice, or with True a matrix [.., E]


def gates_of(node: Node, mask: Mask) -> list[Gates]:
    """What `node`, a number [R, 1] for each of the rows of `mask`, is read from; some spellings fit both kinds."""
    return gates_of_numbers(node, mask) if value(node).dim() == 2 and same_size(value(node).shape[-1], 1) else []


def gates_of_numbers(node: Node, mask: Mask) -> list[Gates]:
    """`gates_of` for `node`, a number [R, 1] or [R] for each of the rows of `mask`."""
    if mask.any and (own := match_chosen_gate(node, lambda n: unread(n, mask))) is not None:
        return [(own[1], False)] if own[0] is mask.indices and own[2] == mask.expert else []
    node = through(node, _COLUMNS)
    if node.target is aten.gather.default:
        return _by_first_mark(node, mask)
    column = None
    if node.target is aten.select.int and node.args[1] in (1, -1):
        node, column = node.args[0], node.args[2]  # type: ignore[assignment]
    read = read_at(node) or read_at(node, _column_of(node))
    if read is None:
        return []
    if column is None and (found := _by_marks(node, mask) or _by_slots(*read, mask)):
        return found
    gates = read[0]
    if column is None and mask.any and (own := match_chosen_gate(gates)) is not None:
        meant = own[0] is mask.indices and own[2] == mask.expert and picked(read[1]) == mask
        return [(own[1], False)] if meant else []
    if column is None:
        choices, column = one_choice(_without_ones(gates))
        gates = gates if column is None else choices
    return _by_rows(gates, read[1], mask) if column is None else _of_column(gates, column, read[1], mask)  # type: ignore[arg-type]


def _column_of(part: Node) -> Node | None:
    """The numbers [S] of which `part` is some as [.., 1]."""
    whole = whole_of(part)
    column = whole is not None and whole.target in _COLUMNS and value(whole).dim() == 2 and value(whole).shape[-1] == 1
    numbers: Any = whole.args[0] if column and whole is not None else None
    return numbers if numbers is not None and value(numbers).dim() == 1 else None


def _without_ones(gates: Node) -> Node:
    """`gates` before views that give each token's own a dimension of 1."""
    views = RESHAPES | {aten.unsqueeze.default}
    return through(gates, lambda n: n.target in views and same_size(value(n).shape[-1], 1))


def _by_rows(gates: Node, positions: list[Node], mask: Mask) -> list[Gates]:
    """Of `gates` at `positions` of each row's token and choice, or of its token where there is one choice."""
    slots, indices = "s" in mask.dims, value(mask.indices)
    if mask.choice is not None or mask.any or picked(positions, slots) != mask:
        return []
    whole = value(gates).dim() == read_by(positions)
    alike = not slots or same_size(value(gates).shape[-1], indices.shape[-1])
    alike = alike and read_over(gates, positions[: len(positions) - slots], mask.indices, slots)
    return [(gates, False)] if whole and alike else []


def _of_column(gates: Node, column: int, positions: list[Node], mask: Mask) -> list[Gates]:
    """Of one column of `gates` at the rows' tokens."""
    alike = same_shape(gates, mask.indices) or read_over(gates, positions, mask.indices, has_choices(mask))
    if picked(positions) != mask or not alike:
        return []
    found, width = [], value(gates).shape[-1]
    if column == mask.choice and same_size(width, value(mask.indices).shape[-1]):
        found.append((gates, False))
    scores = scores_of(mask.indices)
    if column == mask.expert and scores is not None and same_size(width, value(scores).shape[-1]):
        found.append((gates, True))
    return found


def _by_marks(node: Node, mask: Mask) -> list[Gates]:
    """Of gates [.., k] where a mask over choices holds, of all of them or of the rows' tokens."""
    if node.target is not aten.index.Tensor or len(node.args[1]) != 1 or not _comes_by_token(mask):  # type: ignore[arg-type]
        return []
    gates, (marks,) = node.args  # type: ignore[misc]
    if not isinstance(marks, Node) or value(marks).dtype is not torch.bool or not isinstance(gates, Node):
        return []
    of_rows = unread(gates, mask) if mask.any else None
    own = match_mask(marks) if of_rows is None else _marks_of_rows(marks, mask)
    gates = gates if of_rows is None else of_rows
    return [(gates, False)] if _marks_all(own, mask) and same_shape(gates, mask.indices) else []


def _by_first_mark(node: Node, mask: Mask) -> list[Gates]:
    """Of the rows' gates [R, k] where the first of the rows' marks over choices is, which is the only one."""
    gates, dim, at = node.args[:3]
    at = through(at, _COLUMNS)
    if dim not in (1, -1) or not mask.any or not isinstance(at, Node) or at.target is not aten.argmax.default:
        return []
    if [*at.args[1:2]] not in ([1], [-1]) or not distinct_choices(mask.indices) or not isinstance(gates, Node):
        return []
    own, source = _marks_of_rows(before_casts(at.args[0]), mask), unread(gates, mask)  # type: ignore[arg-type]
    return [(source, False)] if _marks_all(own, mask) and source and same_shape(source, mask.indices) else []


def _marks_all(own: Mask | None, mask: Mask) -> bool:
    """Whether `own` marks, over tokens and their choices, where the expert of `mask` is chosen."""
    if own is None or own.indices is not mask.indices or own.expert != mask.expert or own.choice is not None:
        return False
    return own.by_token and own.dims[-1] == "s" and not own.any


def _marks_of_rows(marks: Node, mask: Mask) -> Mask | None:
    """The mask over choices that `marks` is at the rows' tokens."""
    if (whole := unread(marks, mask)) is not None:
        return match_mask(whole)
    indices = unread(marks.args[0], mask) if marks.target is aten.eq.Scalar else None  # type: ignore[arg-type]
    if indices is not mask.indices or marks.args[1] != mask.expert:
        return None
    tokens = tuple("tuv"[: value(mask.indices).dim() - 1])
    return Mask(mask.indices, (*tokens, "s"), mask.expert)


def _comes_by_token(mask: Mask) -> bool:
    """Whether rows come in the order of tokens, and none of them twice."""
    if mask.above is not None:
        return False  # of some gates there is no row
    return mask.any and distinct_choices(mask.indices) or mask.dims == ("t", "s") and mask.order is None


def _by_slots(gates: Node, positions: list[Node], mask: Mask) -> list[Gates]:
    """Of gates in one dimension, for tokens and their choices, at the rows' slots."""
    return of_slots(gates, mask) if at_slots(positions, mask) else []


def of_slots(gates: Node, mask: Mask) -> list[Gates]:
    """What `gates` in one dimension, for tokens and their choices, are before reshapes."""
    gates = through(gates, lambda n: n.target in RESHAPES and not same_shape(n, mask.indices))
    return [(gates, False)] if same_shape(gates, mask.indices) else []


def numbers_of_column(column: Node) -> Node:
    """The numbers [R] of which `column` [R, 1] is made, before casts and copies of either; `column` before these where
    it is made of something else."""
    def adds_one(n: Node) -> bool:
        two = (n.target in RESHAPES or n.target is aten.unsqueeze.default) and value(n).dim() == 2
        return two and same_size(value(n).shape[1], 1) and value(n.args[0]).dim() == 1

    return through(column, is_cast, COPIES, adds_one)  # type: ignore[no-any-return]


def gates_in_order(gate: Node, order: Node) -> Node:
    """The gates, one for every slot, of which `gate` [S, 1] has those of rows in `order`. Raises Refused."""
    column = value(gate).dim() == 2 and value(gate).shape[-1] == 1
    refuse_if(not column, gate, "gates", "an expert's rows are not multiplied by one gate per choice")
    gates = numbers_of_column(gate)
    read = row_read(gates)
    if read is None or read[1] is not order:
        refuse(gates, "gates", "the gates are not in the order of the rows")
    refuse_if(value(read[0]).dim() != 1, read[0], "gates", "there is not one gate per choice")
    return read[0]


def weighted_part(rows: Node) -> tuple[Node, Node] | None:
    """(all rows, gates in the order of slots) where `rows` is a part of their product, in the order of experts."""
    whole = whole_of(rows)
    product = None if whole is None else strip_row_views(whole)
    for a, b in multiplied(product):
        read = row_read(strip_row_views(a))
        order = None if read is None else order_of(read[1])
        gates = None if order is None else or_failure(gates_in_order)(b, order)
        if isinstance(gates, Node):
            return strip_row_views(a), gates
    return None
