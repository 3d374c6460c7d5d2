"""Matches updates of an expert's rows, and the chains that a loop makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_shape, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import CASTS, COPIES
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.index_reads import added_rows, indexed
from megacpp_compile.matchers.moe.routing import Mask
from megacpp_compile.matchers.moe.rows import picked
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.links import chain, through

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """`node` is `previous` with `added` in the rows of `token`, a mask over tokens.

    Attributes:
        once: the sum of both is written, so that a row that comes twice counts once.
        overwrites: `added` alone is written; what was there before is lost.
        by_slot: what is written to has a row for every choice of a token, [T, k, d].
        gate: what multiplies `added`, where that is done to all experts' rows at once.
    """

    node: Node
    previous: Node
    token: Mask
    added: Node
    once: bool = False
    overwrites: bool = False
    by_slot: bool = False
    gate: Node | None = None


def row_update(node: Node) -> RowUpdate | None:
    """The update of one expert's rows that `node` is."""
    args = node.args
    if (sum_ := added_rows(node)) is not None:
        rows = picked([sum_[1]])
        return RowUpdate(node, _unviewed(sum_[0]), rows, sum_[2]) if rows else None
    if node.target is aten.index_put.default:
        previous, positions, added, *more = args
        rows = picked(positions)  # type: ignore[arg-type]
        if rows is None and isinstance(added, Node) and not (more and more[0]):
            return _of_slots(node)
        if rows is None or not isinstance(added, Node):
            return None
        previous = _unviewed(previous)  # type: ignore[arg-type]
        if more and more[0]:
            return RowUpdate(node, previous, rows, added)  # type: ignore[arg-type]
        sum_of = _before_rounding(added)
        if sum_of.target is aten.add.Tensor and not sum_of.kwargs:
            for old, new in (sum_of.args, sum_of.args[::-1]):
                read = indexed(old) if isinstance(old, Node) else None
                if read and _unviewed(read[0]) is previous and picked(read[1]) == rows and isinstance(new, Node):
                    return RowUpdate(node, previous, rows, new, once=True)  # type: ignore[arg-type]
        if rows.dims == ("t",) and not rows.any:
            return RowUpdate(node, previous, rows, added, overwrites=True)  # type: ignore[arg-type]
    return None


def row_updates(view: GraphView) -> dict[Node, RowUpdate]:
    """All updates of rows in the graph."""
    return {node: update for node in view.graph.nodes if (update := row_update(node)) is not None}


def _before_rounding(node: Node) -> Node:
    """The sum that `node` rounds, as one in place does to the dtype of what is added to."""
    if node.target not in CASTS:
        return node
    inner: Node = node.args[0]  # type: ignore[assignment]
    wide = torch.promote_types(value(inner).dtype, value(node).dtype) == value(inner).dtype
    return inner if wide else node


def _of_slots(node: Node) -> RowUpdate | None:
    """The write of one expert's outputs to the places of its tokens and choices."""
    previous, positions, added, *_ = node.args
    slots, shape = picked(positions, slots=True), value(previous).shape  # type: ignore[arg-type]
    if slots is None or len(shape) != len(positions) + 1 or len(positions) != value(slots.indices).dim():  # type: ignore[arg-type]
        return None
    if not all(map(same_size, shape[:-1], value(slots.indices).shape)):
        return None
    return RowUpdate(node, _unviewed(previous), slots, added, overwrites=True, by_slot=True)  # type: ignore[arg-type]


def _unviewed(node: Node) -> Node:
    """`node` before reshapes that end in its own shape, which in-place additions to a view leave behind."""
    first, *others = chain(node, RESHAPES)
    return [first, *(n for n in others if same_shape(n, node) or is_filled(n, 0.0))][-1]


def joined(node: Node) -> list[RowUpdate]:
    """Every expert's update in the sum `node` of all experts' rows, which are joined by `cat` as their tokens are:
    `y.index_add(0, torch.cat(tokens), torch.cat(outputs) * torch.cat(gates)[:, None])`."""
    found = added_rows(node)
    tokens = None if found is None else _parts(_uncast(found[1]))
    if found is None or tokens is None:
        return []
    rows, gates = _uncast(found[2]), list[Node | None]([None] * len(tokens))
    outs = _parts(rows)
    if outs is None and rows.target is aten.mul.Tensor and of_tensors(rows):
        for out, gate in (rows.args, rows.args[::-1]):
            cut, own = _parts(_uncast(out)), _parts(_column(gate))  # type: ignore[arg-type]
            if cut is not None and own is not None and len(own) == len(tokens):
                outs, gates = cut, list(own)
                break
    if outs is None or len(outs) != len(tokens):
        return []
    updates = list[RowUpdate]()
    for token, out, gate in zip(tokens, outs, gates, strict=True):
        mask, lengths = picked([token]), [value(part).shape[0] for part in (token, out, gate) if part is not None]
        if mask is None or not all(same_size(lengths[0], n) for n in lengths):
            return []
        updates.append(RowUpdate(node, _unviewed(found[0]), mask, out, gate=gate))
    return updates


def _parts(node: Node) -> list[Node] | None:
    """The tensors of which `node` is made, one behind the other along its first dimension."""
    if node.target is not aten.cat.default or [*node.args, 0][1] not in (0, -value(node).dim()):
        return None
    return list(node.args[0])  # type: ignore[arg-type]


def _uncast(node: Node) -> Node:
    return through(node, is_cast, COPIES)


def _column(gate: Node) -> Node:
    """The numbers [R] of which `gate` [R, 1] is a column, or `gate`."""
    gate = _uncast(gate)
    column = gate.target is aten.unsqueeze.default or gate.target in RESHAPES
    if column and value(gate).dim() == 2 and same_size(value(gate).shape[1], 1) and value(gate.args[0]).dim() == 1:
        return _uncast(gate.args[0])  # type: ignore[arg-type]
    return gate


def chains(updates: dict[Node, RowUpdate]) -> Iterator[list[RowUpdate]]:
    """The updates of one another's results, first update first."""
    inside = {update.previous for update in updates.values() if update.previous in updates}
    for node, last in updates.items():
        if node not in inside:
            chain = [last]
            while chain[0].previous in updates:
                chain.insert(0, updates[chain[0].previous])
            yield chain
