"""Matches sums over experts that are sums over choices, too: `einsum("tk,tke,ted->td", gates, one_hots, outs)`.

The sum over k of gates and one-hots would be a matrix of gates; where it is part of the other, the graph has none.
"""

from __future__ import annotations

from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.factors import Axis, Factor, factors, seen_as
from megacpp_compile.matchers.moe.gate_matrix import Chosen, before_casts
from megacpp_compile.matchers.moe.routing import match_mask


def over_choices(
    node: Node, parts: list[Factor], tokens: tuple[Axis, ...], out: Axis
) -> tuple[list[Factor], Axis, Chosen | MatchFailure] | None:
    """(the factors `parts` of the sum `node` without one-hots and their gates, the axis of experts, the choices) where
    some of them are summed over choices, which nothing with channels `out` has."""
    wide = set[Axis]().union(*(p.axes for p in parts if out in p.axes))
    for hot in parts:
        extra = hot.axes - set(tokens)
        choices, experts = extra - wide, extra & wide
        if out in hot.axes or len(choices) != 1 or len(experts) != 1 or hot.axes != {*tokens, *extra}:
            continue
        (choice,), (expert,) = choices, experts
        split = factors(hot.node, hot.dims, lambda axes, own=hot.axes: axes == own)  # type: ignore[misc]
        beside = [p for p in parts if p is not hot and choice in p.axes]
        if any(p.axes - hot.axes for p in beside):
            continue
        own, rest = [*split, *beside], [p for p in parts if p is not hot and p not in beside]
        return rest, expert, _chosen(node, own, tokens, choice, expert)
    return None


def _chosen(
    node: Node, parts: list[Factor], tokens: tuple[Axis, ...], choice: Axis, expert: Axis
) -> Chosen | MatchFailure:
    """The choices whose one-hots and gates `parts` are."""
    each = tuple((t,) for t in tokens)
    hots = [p for p in parts if expert in p.axes]
    gates = [p for p in parts if p.axes == {*tokens, choice}]
    if len(hots) == len(gates) == 1 and len(parts) == 2:
        marks, own = seen_as(hots[0], (*each, (choice,), (expert,))), seen_as(gates[0], (*each, (choice,)))
        mask = match_mask(before_casts(marks[0])) if marks is not None else None
        if mask is not None and own is not None and mask.by_token and mask.dims[-2:] == ("s", "e"):
            if value(mask.indices).dim() == value(own[0]).dim() == len(tokens) + 1:
                return Chosen(mask.indices, own[0])
    reason = "what is summed over choices and experts is no gate times one-hots of the choices"
    return MatchFailure(node, "gates", reason)
