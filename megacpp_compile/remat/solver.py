"""Less memory step by step, the cheapest step first, until a budget is met.

A lever is a saved value, with its likes in the other layers. Pulling it computes that value again, from what is saved
then or, where that frees nothing, from what is computed again in turn; what it costs is the modelled time of all that
is computed again, after less before, by the bytes it frees. The order in which levers are pulled does not depend on
the budget, and a step that frees nothing, or would raise the predicted peak, is not made: a lower budget goes further
along the same way, so it never keeps more, nor peaks higher. What leaves a layer is no lever, as computing it again
would take the layers before it, all at once.

A limit on the peak is sought in three legs: by steps that lower the peak alone; on from there by those that only keep
less, which may let others lower it; and along the way of the budgets. It takes the first plan that fits of the one
sequence that all limits share, so that a lower limit, too, never peaks higher.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch.fx import Node

from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.remat import costs
from megacpp_compile.remat.kinds import BlockRef
from megacpp_compile.remat.nodes import base_of, is_pinned
from megacpp_compile.remat.planner import MUST_RECOMPUTE, Plan, choices, kept_bytes, leaves_layer, settle

_CHAIN = 8


def solve(
    forward: Sequence[Node],
    needed: Sequence[Node],
    places: Mapping[Node, BlockRef],
    wishes: dict[Node, str],
    kind: str | None,
    fits: Callable[[Plan], bool],
    device: str,
    peak: Callable[[Plan], int],
    lowering: bool = False,
) -> dict[Node, str]:
    """`wishes` with levers pulled until `fits`, or all of them. kind: whose values are levers, None for all; peak: a
    plan's bytes at its predicted peak; lowering: begin with the steps that lower the peak."""
    fixed = choices(forward) | {n for n in forward if is_pinned(n) or leaves_layer(n, places)}
    movable = {n for n in forward if n not in fixed and (kind is None or places[n].kind == kind)}
    start = reached = wishes, settle(forward, needed, wishes)
    if fits(start[1]):
        return wishes
    ends = []
    for strictly, anew in ((True, False), (False, False), (False, True)) if lowering else ((False, False),):
        began = start if anew else reached
        for reached in _steps(forward, needed, *began, movable, device, peak, strictly):
            if fits(reached[1]):
                return reached[0]
        ends.append(reached)
    return min(ends, key=lambda end: peak(end[1]))[0]


def _steps(
    forward: Sequence[Node],
    needed: Sequence[Node],
    wishes: dict[Node, str],
    plan: Plan,
    movable: set[Node],
    device: str,
    peak: Callable[[Plan], int],
    strictly: bool,
) -> Iterator[tuple[dict[Node, str], Plan]]:
    pulled: set[Node] = set()
    refused: set[Node] = set()
    now, at_refusal = peak(plan), None
    while True:
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in plan.saved:
            op = _op(node)
            if op in movable and op not in pulled and op not in refused and kept_bytes(node):
                groups.setdefault(_likeness(op), []).append(op)
        best: tuple[float, list[Node]] | None = None
        before = costs.seconds(plan.recomputed, device)
        for members in groups.values():
            _, trial = _pull(forward, needed, wishes, plan, members[0], movable)
            freed = plan.saved_bytes() - trial.saved_bytes()
            if freed > 0:
                price = (costs.seconds(trial.recomputed, device) - before) / freed
                if best is None or price < best[0]:
                    best = price, members
        if best is None:
            if not refused or len(pulled) == at_refusal:
                return
            refused, at_refusal = set(), len(pulled)  # what was pulled since may have made room for them
            continue
        for node in dict.fromkeys(best[1]):
            further, trial = _pull(forward, needed, wishes, plan, node, movable)
            then = peak(trial)
            if then > now or strictly and then == now:
                refused.add(node)
                continue
            pulled.add(node)
            if trial.saved_bytes() < plan.saved_bytes():
                wishes, plan, now = further, trial, then
                yield wishes, plan


def _pull(
    forward: Sequence[Node], needed: Sequence[Node], wishes: dict[Node, str], plan: Plan, node: Node, movable: set[Node]
) -> tuple[dict[Node, str], Plan]:
    """`node` computed again, and so, until that frees something, what would be saved for it."""
    here = set(plan.saved)
    trial, found = plan, [node]
    for _ in range(_CHAIN):
        wishes = {**wishes, **dict.fromkeys(_with_parts(found), MUST_RECOMPUTE)}
        trial = settle(forward, needed, wishes)
        if trial.saved_bytes() < plan.saved_bytes():
            break
        found = [op for n in trial.saved if n not in here and (op := _op(n)) in movable]
        if not found:
            break
    return wishes, trial


def read_bytes(
    needed: Sequence[Node], forward: Sequence[Node], places: Mapping[Node, BlockRef], kind: str | None
) -> int:
    """What backward reads of the forward: the bytes kept if nothing at all was computed again."""
    inner = set(forward)
    bases = dict.fromkeys(b for n in needed if (b := base_of(n, through_items=False)) in inner)
    return sum(kept_bytes(n) for n in bases if kind is None or places[n].kind == kind)


def _op(node: Node) -> Node:
    """The operation whose result, or part of it, is saved."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _with_parts(ops: Iterable[Node]) -> Iterator[Node]:
    for op in ops:
        yield op
        yield from _with_parts(u for u in op.users if u.target is operator.getitem)


def _likeness(node: Node) -> tuple[object, ...]:
    name = re.sub(r"\d+", "#", module_fqn(node))
    return str(node.target), name, str(node.meta.get("val")), tuple(str(a.target)[:24] for a in node.all_input_nodes
                                                                   if a.op == "call_function")  # fmt: skip
