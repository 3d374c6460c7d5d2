"""Matches experts over rows of which each has one choice, by copies of weights: `act(x @ w_up[ids]) @ w_down[ids]`.

What becomes of the rows, such as a sum over those of a token, is left to the graph, as with rows in a loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.gate_behind import gate_behind
from megacpp_compile.matchers.moe.gathered_experts import NEGATIVE, GatheredExpert, expert_of
from megacpp_compile.matchers.moe.index_reads import READS, indexed
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, around, bounded
from megacpp_compile.matchers.moe.routing import is_nonnegative

aten = torch.ops.aten
_NEAR = 24  # nodes to look at
_ENDS = (
    aten.einsum.default, aten.bmm.default, aten.matmul.default, aten.baddbmm.default, aten.sum.dim_IntList,
    aten.add.Tensor,
)  # fmt: skip


def find(view: GraphView, found: Sequence[RoutedExperts | MatchFailure]) -> Iterator[RoutedExperts | MatchFailure]:
    """Every such layer that is no part of one that is `found`, and what is nearly one with no failure near."""
    if not any(map(_copies, view.graph.nodes)):
        return  # which is quicker than to read every product and sum
    inside = set[Node]().union(*(one.inside for one in found if isinstance(one, RoutedExperts)))
    failed = {one.node for one in found if isinstance(one, MatchFailure)}
    for node in reversed(view.graph.nodes):
        if node.target not in _ENDS or node in inside or (expert := expert_of(node)) is None:
            continue
        layer = expert if isinstance(expert, MatchFailure) else _layer(view, node, expert)
        if isinstance(layer, RoutedExperts):
            inside |= layer.inside
            yield layer
        elif layer is not None:
            told = not failed.isdisjoint(around(node))
            failed |= {node, layer.node}
            if not told:
                yield layer


def _copies(node: Node) -> bool:
    """Whether `node` may be weights, one for each row."""
    read = indexed(node) if node.target in READS else None
    return read is not None and value(read[0]).dim() == 3 and value(node).is_floating_point()


def without_theirs(
    found: Sequence[RoutedExperts | MatchFailure], layers: Sequence[RoutedExperts | MatchFailure]
) -> list[RoutedExperts | MatchFailure]:
    """`found` without failures of sums of what `layers` make of each row."""
    ends = {one.output for one in layers if isinstance(one, RoutedExperts)}
    return [one for one in found if isinstance(one, RoutedExperts) or ends.isdisjoint(_made_of(one.node))]


def _made_of(node: Node) -> list[Node]:
    """`node` and what it is made of in a few steps."""
    order = [node]
    for n in order:
        order += [a for a in n.all_input_nodes if a not in order] if len(order) < _NEAR else []
    return order


def _layer(view: GraphView, node: Node, found: GatheredExpert) -> RoutedExperts | MatchFailure | None:
    """The layer that `found` is, whose output is `node`."""
    if found.ids is None or found.gate is not None:
        return None
    if not is_nonnegative(found.ids):
        return MatchFailure(found.ids, "range", NEGATIVE)
    layer = RoutedExperts(node, found.expert.x, found.ids, None, (found.expert,), choices=1)
    return bounded(view, gate_behind(layer))
