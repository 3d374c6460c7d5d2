"""Matches loops over experts whose rows follow one another in their order: a sum over each token's choices reads all
outputs, joined or written to one buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.combines import Combine, gates_in_order, layers_behind
from megacpp_compile.matchers.moe.group_ends import slots, sorted_by
from megacpp_compile.matchers.moe.loop import match_chain
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts
from megacpp_compile.matchers.moe.row_gates import of_slots
from megacpp_compile.matchers.moe.row_updates import RowUpdate
from megacpp_compile.matchers.moe.segments import segments

aten = torch.ops.aten


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every sum over outputs of experts that lie in the experts' order."""
    return layers_behind(view, _check)


def writes(layer: RoutedExperts) -> Iterator[RowUpdate]:
    """The outputs of single experts in `layer` that are joined or written to a buffer, in the experts' order."""
    sorts = ((order, sorted_by(order)) for order in sorted(layer.inside))
    # The order that puts rows back may be an argsort, too: of the experts' order.
    orders = [order for order, ids in sorts if ids is not None and slots(ids.ids) is layer.indices]
    for node in sorted(layer.inside):
        if node.target in (aten.cat.default, aten.slice_scatter.default) and value(node).is_floating_point():
            for order in orders:
                yield from segments(node, order)


def _check(view: GraphView, node: Node, combine: Combine) -> RoutedExperts | MatchFailure | None:
    """The layer that ends in `combine`; None where what it adds up are no outputs of experts."""
    outputs, gate = combine.weighted, None
    chain = segments(outputs, combine.order)
    if not chain and outputs.target is aten.mul.Tensor and of_tensors(outputs):
        for a, b in (outputs.args, outputs.args[::-1]):
            if chain := segments(a, combine.order):  # type: ignore[arg-type]
                gate = b
                break
    if not chain:
        return None
    gates = None if gate is None else gates_in_order(gate, combine.order)  # type: ignore[arg-type]
    if isinstance(gates, MatchFailure):
        return gates
    own = None if gates is None else of_slots(gates, chain[0].token)
    return match_chain(view, [_added(update, node, combine) for update in chain], gates=own)


def _added(update: RowUpdate, node: Node, combine: Combine) -> RowUpdate:
    """`update` as one that adds to the sum."""
    base: Any = combine.base
    return RowUpdate(node, base, update.token, update.added)
