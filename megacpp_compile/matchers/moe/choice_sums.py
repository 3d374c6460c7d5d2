"""Matches the sum over a token's choices, written out: `y = y + gates[:, k, None] * expert(x, w[indices[:, k]])`.

Each choice has GEMMs of its own, with copies of the weights of its experts.
"""

from __future__ import annotations

from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.experts import first_unlike
from megacpp_compile.matchers.moe.gate_matrix import match_column
from megacpp_compile.matchers.moe.gathered_experts import NEGATIVE, GatheredExpert, expert_of
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts, bounded
from megacpp_compile.matchers.moe.routing import is_nonnegative

_OTHER = "a token's choices go through other experts, one with another's weights or one on other rows"


def by_choice(
    view: GraphView, node: Node, gates: Node, outs: dict[int, Node], base: Node | None,
    scales: tuple[tuple[Node, tuple[int, ...]], ...] = (),
) -> RoutedExperts | MatchFailure | None:  # fmt: skip
    """The layer whose sum `node` weights `outs`, by column of `gates` [.., k]; None where these are no experts'."""
    found: dict[int, GatheredExpert] = {}
    for column, out in sorted(outs.items()):
        expert = expert_of(out)
        if not isinstance(expert, GatheredExpert):
            return expert
        found[column] = expert
    choices = [None if one.ids is None else match_column(one.ids) for one in found.values()]
    if any(one.gate is not None for one in found.values()) or None in choices:
        return None
    first, (indices, _) = next(iter(found.values())).expert, choices[0]  # type: ignore[misc]
    if [(indices, column) for column in found] != choices:
        return MatchFailure(node, "indices", "a choice's output is multiplied by another choice's gate")
    if list(found) != list(range(len(found))) or not same_size(value(indices).shape[-1], len(found)):
        return MatchFailure(node, "choices", "only some of a token's choices are served")
    experts = [one.expert for one in found.values()]
    alike = all(e.x is first.x and e.parameters == first.parameters for e in experts)
    if not alike or first_unlike(experts) is not None:
        return MatchFailure(node, "experts-differ", _OTHER)
    if not is_nonnegative(indices):
        return MatchFailure(indices, "range", NEGATIVE)
    layer = RoutedExperts(node, first.x, indices, gates, (first,), base=base, choices=len(found), scales=scales)
    return bounded(view, layer)
