"""Layers of routed experts in all spellings."""

from __future__ import annotations

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe import dense, gathered_experts, grouped, loop, sorted_tokens
from megacpp_compile.matchers.moe.routed_experts import RoutedExperts

_SPELLINGS = (loop.find, dense.find, grouped.find, sorted_tokens.find, loop.find_sorted)


def find(view: GraphView) -> tuple[list[RoutedExperts | MatchFailure], list[MatchFailure]]:
    """(every layer, and what is nearly one; why loops are none whose outputs may be weighted elsewhere)."""
    found = [one for spelling in _SPELLINGS for one in spelling(view)]
    ungated = list(loop.ungated(view, found))
    found += [one for one in ungated if isinstance(one, RoutedExperts)]
    by_rows = list(gathered_experts.find_by_rows(view, [*found, *ungated]))
    found = [*gathered_experts.without_theirs(found, by_rows), *by_rows]
    return found, [one for one in ungated if isinstance(one, MatchFailure)]
