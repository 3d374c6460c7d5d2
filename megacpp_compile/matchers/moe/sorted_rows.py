"""Matches experts between grouped GEMMs whose rows come sorted by expert and leave so, as behind the dispatch of expert
parallelism: where each expert's rows end is given, and neither choices nor gates need be.

A layer whose sort and gated sum are in the graph too is whole, and `sorted_tokens` matches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.filled import padded_with
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import expert_ending_in
from megacpp_compile.matchers.moe.gemms import Gemm, Weight, strip_row_views, with_bias
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, SortedExperts, around, bounded
from megacpp_compile.matchers.moe.sorted_slots import number

aten = torch.ops.aten
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_NEAR = 24  # nodes to look at before a GEMM


def find(view: GraphView, found: Sequence[RoutedExperts | MatchFailure]) -> Iterator[SortedExperts | MatchFailure]:
    """Every expert over sorted rows that no layer `found` covers, in the graph's order."""
    covered = {node for one in found if isinstance(one, RoutedExperts) for node in one.inside}
    told = [one.node for one in found if isinstance(one, MatchFailure)]
    layers: list[SortedExperts | MatchFailure] = []
    for node in reversed(view.graph.nodes):
        if node in covered or (ends := _ends_of(node)) is None:
            continue
        layer = _layer(view, node, _SameGroups(ends))
        if isinstance(layer, SortedExperts):
            covered |= layer.inside
        elif layer is None or not around(node).isdisjoint(told):
            continue
        told.append(node)
        layers.append(layer)
    yield from reversed(layers)


def _layer(view: GraphView, node: Node, match_gemm: _SameGroups) -> SortedExperts | MatchFailure | None:
    """The expert that ends in `node`; None where nothing that is like one does."""
    down = match_gemm(node)
    if not isinstance(down, Gemm):
        return None  # the sum with some other bias; the GEMM in it is looked at by itself
    expert = expert_ending_in(down, match_gemm)
    if not isinstance(expert, MatchFailure):
        layer = SortedExperts(node, strip_row_views(expert.x), match_gemm.ends, (expert,), match_gemm.counts)
        return bounded(view, layer)
    linear = isinstance(match_gemm(strip_row_views(down.x)), Gemm)  # as adapters of several texts are
    return None if linear or not match_gemm.before(down.x) else expert


def _ends_of(node: Node) -> Node | None:
    """Where the groups end of the grouped GEMM that `node` is, or adds something to."""
    if (found := grouped_gemm(node)) is not None:
        return found[1]
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    sides = (grouped_gemm(strip_row_views(side)) for side in node.args if isinstance(side, Node))
    return next((found[1] for found in sides if found is not None), None)


def grouped_gemm(node: Node) -> tuple[Gemm, Node] | None:
    """(the GEMM, where each expert's rows end) where `node` multiplies rows by a weight of every expert [E, ., .]."""
    if str(node.target) not in _GROUPED or len(node.args) != 3 or node.kwargs:
        return None
    x, w, ends = node.args
    if value(x).dim() != 2 or value(w).dim() != 3:
        return None
    assert isinstance(x, Node) and isinstance(w, Node) and isinstance(ends, Node)
    if w.target is aten.transpose.int and {d % 3 for d in w.args[1:3]} == {1, 2}:  # type: ignore[operator]
        return Gemm(node, x, Weight(w.args[0], False, every=True)), ends  # type: ignore[arg-type]
    return Gemm(node, x, Weight(w, True, every=True)), ends


class _SameGroups:
    """Matches grouped GEMMs whose groups end at `ends`, and what adds groups' biases, repeated by `counts`."""

    def __init__(self, ends: Node) -> None:
        self.ends = ends
        self.counts: Node | None = None

    def __call__(self, node: Node) -> Gemm | MatchFailure | None:
        return with_bias(node, self._grouped, self._bias)

    def before(self, node: Node) -> bool:
        """Whether such a GEMM lies shortly before `node`."""
        order = [node]
        for n in order:
            if self._grouped(n) is not None:
                return True
            order += [m for m in n.all_input_nodes if m not in order] if len(order) < _NEAR else []
        return False

    def _grouped(self, node: Node) -> Gemm | None:
        found = grouped_gemm(node)
        return found[0] if found is not None and found[1] is self.ends else None

    def _bias(self, node: Node, rows: Node) -> Weight | None:
        """The biases of which `node`, added to `rows`, has one for each row: all repeated as often as rows are counted,
        and perhaps zeros for the rows behind them."""
        node = strip_row_views(node)
        if node.target is not aten.repeat_interleave.self_Tensor or node.args[2:] != (0,):
            return None
        biases, counts = node.args[0], number(node.args[1])  # type: ignore[arg-type]
        assert isinstance(biases, Node)
        if counts.target is aten.cat.default:
            own, first = _before_a_row_of_zeros(biases), _before_a_last(counts)
            if own is None or first is None:
                return None
            biases, counts = own, number(first)  # rows are as many as the repetitions, or it is an error
        summed = number(self.ends)
        counted = summed.target is aten.cumsum.default and number(summed.args[0]) is counts  # type: ignore[arg-type]
        wide = value(biases).dim() == 2 and same_size(value(biases).shape[1], value(rows).shape[-1])
        if not counted or not wide:
            return None
        self.counts = counts
        return Weight(biases, every=True)


def _before_a_row_of_zeros(node: Node) -> Node | None:
    """What `node`, of two dimensions, has one row of zeros behind of; `canonicalize` writes concatenations so."""
    zeros = padded_with(node) == 0 and node.args[1] == [0, 0, 0, 1]
    return node.args[0] if zeros else None  # type: ignore[return-value]


def _before_a_last(node: Node) -> Node | None:
    """The first of two tensors of which `node` is the concatenation, where the last has one entry."""
    if node.target is not aten.cat.default or node.args[1:] not in ((), (0,)) or len(node.args[0]) != 2:  # type: ignore[arg-type]
        return None
    first, last = node.args[0]  # type: ignore[misc]
    one = isinstance(value(last).shape[0], int) and value(last).shape[0] == 1
    return first if one else None  # type: ignore[return-value]
