"""Matches sums over experts that are sums over choices, too: `einsum("tk,tke,ted->td", gates, one_hots, outs)`.

The sum over k of gates and one-hots would be a matrix of gates; where it is part of the other, the graph has none.
Experts may have run once for each choice (`"tk,tke,tked->td"`).
"""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.moe.factors import Axis, Factor, factors, seen_as
from megacpp_compile.matchers.moe.gate_matrix import Chosen, before_casts
from megacpp_compile.matchers.moe.routing import match_mask


@dataclasses.dataclass(frozen=True)
class OverChoices:
    """A sum over choices and experts: its `other` factors, without one-hots and their gates; the axis `experts`; the
    choices, or why these cannot be read; and the axis of choices, `each`, where experts run once for each."""

    other: list[Factor]
    experts: Axis
    chosen: Chosen | MatchFailure
    each: Axis | None = None


def over_choices(node: Node, parts: list[Factor], tokens: tuple[Axis, ...], out: Axis) -> OverChoices | None:
    """The sum `node` of the product of `parts` as one over choices, too, where some of them are no experts'."""
    for hot in parts:
        extra = hot.axes - set(tokens)
        if out in hot.axes or len(extra) != 2 or hot.axes != {*tokens, *extra}:
            continue
        wide = set[Axis]().union(*(p.axes for p in parts if p.axes - hot.axes))
        for choice in extra:
            (expert,) = extra - {choice}
            beside = [p for p in parts if p is not hot and choice in p.axes and p.axes <= hot.axes]
            if expert not in wide:
                continue
            split = factors(hot.node, hot.dims, lambda axes, own=hot.axes: axes == own)  # type: ignore[misc]
            chosen = _chosen(node, [*split, *beside], tokens, choice, expert)
            if choice in wide and isinstance(chosen, MatchFailure):
                continue  # some other sum over what has three dimensions more
            other = [p for p in parts if p is not hot and p not in beside]
            return OverChoices(other, expert, chosen, choice if choice in wide else None)
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
