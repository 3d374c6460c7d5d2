"""Matches all slots sorted by expert: grouped GEMMs of their rows, and the sum over each token's choices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.views import COPIES
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.activation import bound_of
from megacpp_compile.matchers.moe.combines import Combine, gates_in_order, layers_after
from megacpp_compile.matchers.moe.experts import Expert, match_expert
from megacpp_compile.matchers.moe.gemms import Gemm, Weight, strip_row_views, with_bias
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.matchers.moe.rows import tokens_in_order
from megacpp_compile.matchers.moe.sorted_rows import grouped_gemm
from megacpp_compile.matchers.moe.sorted_slots import slots, sorted_by
from megacpp_compile.reader.index_reads import indexed
from megacpp_compile.reader.links import through

aten = torch.ops.aten


def find(view: GraphView) -> Iterator[RoutedExperts | MatchFailure]:
    """Every sum over rows that are sorted by expert."""
    return layers_after(view, _check)


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
    gates = gates_in_order(gate, order)  # type: ignore[arg-type]
    if isinstance(gates, MatchFailure):
        return gates
    x = tokens_in_order(rows, order, value(node).shape[0], combine.choices)
    if x is None or not same_size(value(x).shape[0] * combine.choices, value(ids).shape[0]):
        return MatchFailure(expert.x, "rows", "what experts read are not the tokens, one row for each choice")
    if match_gemm.limits - {value(expert.down.weight.tensor).shape[0]}:
        return MatchFailure(node, "masked", "rows of some experts are set to zero")
    layer = RoutedExperts(
        node, x, slots(ids), gates, (expert,), base=combine.base, choices=combine.choices, scaled_input=scaled_input
    )
    return bounded(view, layer)


class _GroupedGemms:
    """Matches grouped GEMMs whose groups end where each expert's rows do.

    Attributes:
        ids: the slots' experts, by which `order` sorts; sorted: the same, and where each expert's end.
        failure: the last GEMM whose groups end elsewhere.
        limits: the expert numbers from which on rows are set to zero.
    """

    def __init__(self, order: Node) -> None:
        found = sorted_by(order)
        assert found is not None
        self.sorted, self.ids, self.order = found, found.ids, order
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
        experts = value(read[0]).shape[0]
        # A clamp moves numbers of no expert alone.
        ids = through(read[1][0], COPIES, lambda n: (limit := bound_of(n)) is not None and limit[1].high >= experts - 1)
        return Weight(read[0], every=True) if self.sorted.has(ids, in_order=True) else None

    def unmasked(self, node: Node) -> Node:
        """`node` before rows of no expert are set to zero."""
        while node.target is aten.masked_fill.Scalar and node.args[2] == 0:
            mask = through(node.args[1], aten.unsqueeze.default, aten.view.default, aten.reshape.default)
            if mask.target is not aten.ge.Scalar or mask.args[0] is not self.sorted.ordered:  # type: ignore[union-attr]
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
