"""Finds experts between grouped GEMMs whose rows come sorted by expert and leave so, as behind the dispatch of expert
parallelism: where each expert's rows end is given, and neither choices nor gates are.

`megacpp::moe` sorts slots itself, reads tokens where they lie and sums over choices. For rows that are sorted already
the sort and the sum would be two passes over them more than the plain code has, so such a layer is a near miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import Expert, expert_ending_in
from megacpp_compile.matchers.moe.gemms import Gemm, Weight
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, around

aten = torch.ops.aten
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_REASON = (
    "rows come sorted by expert, and no sum of them by gates is in this graph, as between the all-to-alls of expert "
    "parallelism: the op sorts tokens by their choices, and has no form for rows that are sorted"
)


def find(view: GraphView, found: Sequence[RoutedExperts | MatchFailure]) -> Iterator[MatchFailure]:
    """A failure for every expert over sorted rows that nothing `found` covers."""
    covered = set[Node]()
    for one in found:
        covered |= one.inside if isinstance(one, RoutedExperts) else around(one.node)
    for node in view.graph.nodes:
        if (down := grouped_gemm(node)) is None or node in covered:
            continue
        expert = expert_ending_in(down[0], _SameGroups(down[1]))
        if isinstance(expert, Expert) and covered.isdisjoint(up.node for up in expert.ups):
            yield MatchFailure(node, "sorted-rows", _REASON)


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
    """Matches grouped GEMMs whose groups end at `ends`."""

    def __init__(self, ends: Node) -> None:
        self.ends = ends

    def __call__(self, node: Node) -> Gemm | None:
        found = grouped_gemm(node)
        return found[0] if found is not None and found[1] is self.ends else None
