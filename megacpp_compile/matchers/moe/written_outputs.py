"""Matches buffers of experts' outputs: in the order of experts, joined by `cat` or each written to its part, or one for
every choice, written by a loop over experts."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import is_blank
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.combines import unsorted
from megacpp_compile.matchers.moe.experts import Expert
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.moe.iterations import RowUpdate, in_expert_order, iterations_of, row_update
from megacpp_compile.matchers.moe.rows import in_order
from megacpp_compile.matchers.moe.sorted_slots import SortedIds, expert_between, sorted_by
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


@dataclasses.dataclass(frozen=True)
class Written:
    """Outputs for every choice, in its place.

    Attributes:
        rows: what experts read: of every choice a row in the same place, or with `by_token` the tokens.
        first: the first expert's number.
        flat: outputs have one dimension for all choices, whatever the shape of these.
    """

    choices: Node
    rows: Node
    experts: list[Expert]
    first: int
    by_token: bool
    flat: bool = False


def written_to(node: Node) -> Written | None:
    """What experts have written to `node`; None for anything else."""
    chain: list[RowUpdate] = []
    if (put := unsorted(node)) is not None:
        chain = segments(*put)
    else:
        while (update := row_update(node)) is not None and update.overwrites:
            chain.insert(0, update)
            node = update.previous
        chain = chain if is_blank(node) else []
    if not chain:
        return None
    by_slot = chain[0].by_slot
    if any(update.by_slot != by_slot for update in chain) or not by_slot and value(chain[0].token.indices).dim() != 1:
        return None
    iterations = iterations_of(chain, gated=False)
    ordered = iterations if isinstance(iterations, MatchFailure) else in_expert_order(iterations)
    if isinstance(ordered, MatchFailure):
        return None
    mask = ordered[0].update.token
    assert mask.expert is not None
    experts = [t.expert for t in ordered if t.expert is not None]
    return Written(mask.indices, ordered[0].x, experts, mask.expert, by_slot, flat=put is not None)
