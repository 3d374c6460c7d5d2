"""Matches all slots sorted by expert: grouped GEMMs of their rows, and the sum over each token's choices."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.views import COPIES, uncast
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.filled import is_filled
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.activation import bound_of
from megacpp_compile.matchers.moe.experts import Expert, match_expert
from megacpp_compile.matchers.moe.gemms import Gemm, Weight, strip_row_views, with_bias
from megacpp_compile.matchers.moe.group_ends import SortedIds, slots
from megacpp_compile.matchers.moe.index_reads import added_rows, indexed
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.matchers.moe.slot_rows import choices_of, order_of_tokens, tokens_in_order
from megacpp_compile.matchers.moe.sorted_rows import grouped_gemm
from megacpp_compile.matchers.views import RESHAPES, is_cast

aten = torch.ops.aten


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every sum over rows that are sorted by expert."""
    for node in view.graph.nodes:
        combine = _summed(node) if node.target is aten.sum.dim_IntList else _added(node)
        if combine is not None and (found := _check(view, node, combine)) is not None:
            yield found


@dataclasses.dataclass(frozen=True)
class Combine:
    """The sum of each token's `choices` among the `weighted` rows, which lie in `order` of slots, added to `base`."""

    weighted: Node
    order: Node
    choices: int
    base: Node | None = None


def _summed(node: Node) -> Combine | None:
    """The combine that puts rows back into the order of slots, and sums over the choices."""
    dims = node.args[1]
    keep = node.args[2] if len(node.args) > 2 else False
    slots = uncast(node.args[0])  # type: ignore[arg-type]
    if value(slots).dim() != 3 or list(dims) not in ([1], [-2]) or keep or slots.target not in RESHAPES:  # type: ignore[arg-type]
        return None
    choices = value(slots).shape[1]
    read = _unsorted(uncast(slots.args[0]))  # type: ignore[arg-type]
    if read is None or value(read[0]).dim() != 2 or not isinstance(choices, int):
        return None
    return Combine(uncast(read[0]), read[1], choices)


def _added(node: Node) -> Combine | None:
    """The combine that adds rows to those of their tokens."""
    added = added_rows(node)
    if added is None:
        return None
    base, token, rows = added
    if value(rows).dim() != 2:
        return None
    tokens = value(base).shape[0]
    choices = choices_of(token, tokens)
    order = None if choices is None else order_of_tokens(token, tokens, choices)
    if choices is None or order is None or _sorted_by(order) is None:
        return None
    return Combine(uncast(rows), order, choices, None if is_filled(base, 0.0) else base)


def _check(view: GraphView, node: Node, combine: Combine) -> RoutedExperts | MatchFailure | None:
    """The layer of experts that ends in `combine`; None where what it adds up is no expert's output."""
    weighted = combine.weighted
    if weighted.target is aten.mul.Tensor and of_tensors(weighted):
        for out, gate in (weighted.args, weighted.args[::-1]):
            match_gemm = _GroupedGemms(combine.order)
            expert = match_expert(match_gemm.unmasked(strip_row_views(out)), match_gemm)  # type: ignore[arg-type]
            if expert is not None:
                return _routed(view, node, combine, expert, gate, match_gemm)  # type: ignore[arg-type]
        return None
    match_gemm = _GroupedGemms(combine.order)
    expert = match_expert(match_gemm.unmasked(weighted), match_gemm)
    return None if expert is None else _routed(view, node, combine, expert, None, match_gemm)


def _routed(
    view: GraphView,
    node: Node,
    combine: Combine,
    expert: Expert | MatchFailure,
    gate: Node | None,
    match_gemm: _GroupedGemms,
) -> RoutedExperts | MatchFailure | None:
    """The layer of `expert`, whose output `gate` multiplies; where that is None, a gate has to multiply its input."""
    if isinstance(expert, MatchFailure):
        return expert
    if match_gemm.failure is not None:
        return match_gemm.failure
    ids, order, scaled_input = match_gemm.ids, combine.order, gate is None
    rows = match_gemm.unmasked(strip_row_views(expert.x))
    if gate is None:
        if rows.target is not aten.mul.Tensor or not of_tensors(rows):
            return MatchFailure(
                expert.x, "no-gate", "neither what an expert reads nor what it adds is multiplied by a gate"
            )
        a, b = rows.args
        rows, gate = (a, b) if value(b).shape[-1:] == (1,) else (b, a)  # type: ignore[assignment]
        rows = strip_row_views(rows)
    if value(gate).dim() != 2 or value(gate).shape[-1] != 1:
        return MatchFailure(gate, "gates", "an expert's rows are not multiplied by one gate per choice")
    gates = gate
    while is_cast(gates) or gates.target is aten.unsqueeze.default or (
        gates.target in RESHAPES and value(gates).dim() == 2 and value(gates.args[0]).dim() == 1
    ):  # fmt: skip
        gates = gates.args[0]  # type: ignore[assignment]
    read = indexed(gates)
    if read is None or read[1] != [order]:
        return MatchFailure(gates, "gates", "the gates are not in the order of the rows")
    gates = read[0]
    if value(gates).dim() != 1:
        return MatchFailure(gates, "gates", "there is not one gate per choice")
    x = tokens_in_order(rows, order, value(node).shape[0], combine.choices)
    if x is None or not same_size(value(x).shape[0] * combine.choices, value(ids).shape[0]):
        return MatchFailure(expert.x, "rows", "what experts read are not the tokens, one row for each choice")
    if match_gemm.limits - {value(expert.down.weight.tensor).shape[0]}:
        return MatchFailure(node, "masked", "rows of some experts are set to zero")
    layer = RoutedExperts(
        node, x, slots(ids), gates, (expert,), base=combine.base, choices=combine.choices, scaled_input=scaled_input
    )
    return bounded(view, layer)


def _ascends(order: Node) -> bool:
    """Whether `order` is an ascending argsort of numbers in one dimension."""
    sorts = order.target in (aten.argsort.default, aten.argsort.stable)
    return sorts and len(order.args) == 1 and not order.kwargs.get("descending")


def _sorted_by(order: Node) -> tuple[Node, Node | None] | None:
    """(numbers, the sorted numbers' node if there is one) where `order` is the numbers' ascending order."""
    if _ascends(order):
        return order.args[0], None  # type: ignore[return-value]
    if order.target is operator.getitem and order.args[1] == 1:
        sort = order.args[0]
        if (
            sort.target in (aten.sort.default, aten.sort.stable)
            and len(sort.args) == 1
            and not sort.kwargs.get(  # type: ignore[union-attr]
                "descending"
            )
        ):
            first = next((u for u in sort.users if u.target is operator.getitem and u.args[1] == 0), None)  # type: ignore[union-attr]
            return sort.args[0], first  # type: ignore[union-attr, return-value]
    return None


def _unsorted(node: Node) -> tuple[Node, Node] | None:
    """(rows in some order, that order) where `node` puts them back into the order of slots."""
    read = indexed(node)
    if read is None or len(read[1]) != 1 or not isinstance(read[1][0], Node):
        return None
    back = read[1][0]
    if _ascends(back):
        order = back.args[0]
    elif back.target is aten.index_put.default and len(back.args) == 3 and len(back.args[1]) == 1:  # type: ignore[arg-type]
        empty, (order,), numbers = back.args  # type: ignore[misc]
        while numbers.target in RESHAPES:  # type: ignore[union-attr]
            numbers = numbers.args[0]  # type: ignore[union-attr]
        count = value(numbers).shape
        if numbers.target is not aten.arange.default or len(numbers.args) != 1 or count != value(empty).shape:  # type: ignore[union-attr]
            return None
    else:
        return None
    return (read[0], order) if isinstance(order, Node) and _sorted_by(order) is not None else None


class _GroupedGemms:
    """Matches grouped GEMMs whose groups end where each expert's rows do.

    Attributes:
        ids: the slots' experts, by which `order` sorts; sorted: where these end.
        failure: the last GEMM whose groups end elsewhere.
        limits: the expert numbers from which on rows are set to zero.
    """

    def __init__(self, order: Node) -> None:
        found = _sorted_by(order)
        assert found is not None
        self.found = found
        self.ids, self.order = found[0], order
        self.sorted = SortedIds(found[0], order, found[1])
        self.failure: MatchFailure | None = None
        self.limits = set[object]()

    def __call__(self, node: Node) -> Gemm | MatchFailure | None:
        return with_bias(self.unmasked(node), self._grouped, self._bias)

    def _bias(self, node: Node, rows: Node) -> Weight | None:
        """The experts' biases of which `node`, added to `rows`, has one for each row."""
        read = indexed(strip_row_views(node))
        if read is None or len(read[1]) != 1 or value(read[0]).dim() != 2:
            return None
        if not same_size(value(read[0]).shape[1], value(rows).shape[-1]):
            return None
        ids, experts = read[1][0], value(read[0]).shape[0]
        while ids.target in COPIES or (limited := bound_of(ids)) is not None and limited[1].high >= experts - 1:
            ids = ids.args[0]  # a clamp moves numbers of no expert alone
        return Weight(read[0], every=True) if self.sorted.has(ids, in_order=True) else None

    def unmasked(self, node: Node) -> Node:
        """`node` before rows of no expert are set to zero."""
        while node.target is aten.masked_fill.Scalar and node.args[2] == 0:
            mask = node.args[1]
            while mask.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default):  # type: ignore[union-attr]
                mask = mask.args[0]  # type: ignore[union-attr]
            if mask.target is not aten.ge.Scalar or mask.args[0] is not self.found[1]:  # type: ignore[union-attr]
                break
            self.limits.add(mask.args[1])  # type: ignore[union-attr]
            node = strip_row_views(node.args[0])  # type: ignore[arg-type]
        return node

    def _grouped(self, node: Node) -> Gemm | None:
        found = grouped_gemm(node)
        if found is None:
            return None
        gemm, ends = found
        if not self.sorted.end_at(ends, value(gemm.weight.tensor).shape[0]):
            self.failure = MatchFailure(node, "offsets", "the groups do not end where each expert's rows do")
        return gemm
