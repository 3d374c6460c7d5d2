"""Matches the sum over each token's choices of rows that lie in the order of experts, and an expert's part of
rows that their gates multiply before they are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.views import uncast
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts
from megacpp_compile.matchers.moe.rows import choices_numbered, order_of, order_of_tokens
from megacpp_compile.matchers.moe.sorted_slots import ascends, sorted_by, whole_of
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.index_reads import added_rows, indexed
from megacpp_compile.reader.links import through

aten = torch.ops.aten
_LIKE = (aten.empty_like.default, aten.zeros_like.default)


@dataclasses.dataclass(frozen=True)
class Combine:
    """The sum of each token's `choices` among the `weighted` rows, which lie in `order` of slots, added to `base`."""

    weighted: Node
    order: Node
    choices: int
    base: Node | None = None


Check = Callable[[GraphView, Node, Combine], RoutedExperts | MatchFailure | None]


def layers_after(view: GraphView, check: Check) -> Iterator[RoutedExperts | MatchFailure]:
    """What `check` makes of every combine of the graph, where that is a layer or nearly one."""
    for node in view.graph.nodes:
        combine = match_combine(node)
        if combine is not None and (found := check(view, node, combine)) is not None:
            yield found


def match_combine(node: Node) -> Combine | None:
    """The combine that `node` is."""
    return _summed(node) if node.target is aten.sum.dim_IntList else _added(node)


def _summed(node: Node) -> Combine | None:
    """The combine that puts rows back into the order of slots, and sums over the choices."""
    slots = uncast(node.args[0])  # type: ignore[arg-type]
    if value(slots).dim() != 3 or reduced_dims(node) != ([1], False) or slots.target not in RESHAPES:
        return None
    choices = value(slots).shape[1]
    read = unsorted(uncast(slots.args[0]))  # type: ignore[arg-type]
    if read is None or value(read[0]).dim() != 2 or not isinstance(choices, int):
        return None
    return Combine(uncast(read[0]), read[1], choices)


def _added(node: Node) -> Combine | None:
    """The combine that adds rows to those of their tokens."""
    found = added_rows(node, to_zeros=True)
    if found is None:
        return None
    base, token, rows = found
    if value(rows).dim() != 2:
        return None
    tokens = value(base).shape[0]
    choices = choices_numbered(token, tokens)
    order = None if choices is None else order_of_tokens(token, tokens, choices)
    if choices is None or order is None or sorted_by(order) is None:
        return None
    return Combine(uncast(rows), order, choices, None if is_filled(base, 0.0) else base)


def gates_in_order(gate: Node, order: Node) -> Node | MatchFailure:
    """The gates, one for every slot, of which `gate` [S, 1] has those of rows in `order`."""
    if value(gate).dim() != 2 or value(gate).shape[-1] != 1:
        return MatchFailure(gate, "gates", "an expert's rows are not multiplied by one gate per choice")
    gates = through(
        gate, is_cast, aten.unsqueeze.default,
        lambda n: n.target in RESHAPES and value(n).dim() == 2 and value(n.args[0]).dim() == 1,
    )  # fmt: skip
    read = indexed(gates)
    if read is None or read[1] != [order]:
        return MatchFailure(gates, "gates", "the gates are not in the order of the rows")
    if value(read[0]).dim() != 1:
        return MatchFailure(read[0], "gates", "there is not one gate per choice")
    return read[0]


def unsorted(node: Node) -> tuple[Node, Node] | None:
    """(rows in some order, that order) where `node` puts them back into the order of slots."""
    if node.target is aten.index_put.default and len(node.args) == 3 and len(node.args[1]) == 1:  # type: ignore[arg-type]
        buffer, (order,), rows = node.args  # type: ignore[misc]
        whole = buffer.target in _LIKE and buffer.args[0] is rows  # type: ignore[union-attr]
        whole = whole or same_size(value(buffer).shape[0], value(order).shape[0])
        put = whole and value(rows).dim() == value(buffer).dim()  # type: ignore[arg-type]
        return (rows, order) if put and sorted_by(order) is not None else None  # type: ignore[return-value, arg-type]
    read = indexed(node)
    if read is None or len(read[1]) != 1 or not isinstance(read[1][0], Node):
        return None
    order = _inverted(read[1][0])
    return (read[0], order) if order is not None and sorted_by(order) is not None else None


def _inverted(back: Node) -> Node | None:
    """The order that `back` puts back: an argsort of it, or every place put where the order has it."""
    if ascends(back):
        return back.args[0]  # type: ignore[return-value]
    if back.target is not aten.index_put.default or len(back.args) != 3 or len(back.args[1]) != 1:  # type: ignore[arg-type]
        return None
    empty, (order,), numbers = back.args  # type: ignore[misc]
    numbers = through(numbers, RESHAPES)
    counts_up = numbers.target is aten.arange.default and len(numbers.args) == 1  # type: ignore[union-attr]
    return order if counts_up and value(numbers).shape == value(empty).shape else None


def weighted_part(rows: Node) -> tuple[Node, Node] | None:
    """(all rows, gates in the order of slots) where `rows` is a part of their product, in the order of experts."""
    whole = whole_of(rows)
    product = None if whole is None else strip_row_views(whole)
    if product is None or product.target is not aten.mul.Tensor or not of_tensors(product):
        return None
    for a, b in (product.args, product.args[::-1]):
        read = indexed(strip_row_views(a))  # type: ignore[arg-type]
        order = None if read is None or len(read[1]) != 1 else order_of(read[1][0])
        gates = None if order is None else gates_in_order(b, order)  # type: ignore[arg-type]
        if isinstance(gates, Node):
            return strip_row_views(a), gates  # type: ignore[arg-type]
    return None
