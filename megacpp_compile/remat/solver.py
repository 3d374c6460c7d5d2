"""Meets a budget or a limit: saves one value after the other less, the cheapest by time per byte first.

A step turns a saved value from saving to recomputing, and then the values like it in the other layers. Where that frees
nothing, because other values are saved instead, it turns those too. Its price is the modelled time of all
recomputation, after the step less before it, divided by the bytes it frees. The order of the steps does not depend on
the budget, and a step that frees nothing, or raises the predicted peak, is not taken. So a lower budget takes the same
steps and more: it never saves more, nor peaks higher. A value that leaves its layer always stays saved, as recomputing
it would run the layers before it again, all at once.

For a limit on the peak there are three sequences of steps: first those that lower the peak, then those that only save
less, which may make room for more of the first sort, then the steps of the budgets from the start. Every limit takes
the first plan that fits of this one sequence, so a lower limit never peaks higher either.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from torch.fx import Node

from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.reader.links import through
from megacpp_compile.remat import costs
from megacpp_compile.remat.closure import settle
from megacpp_compile.remat.decisions import selection_inputs
from megacpp_compile.remat.nodes import is_pinned
from megacpp_compile.remat.plan import MUST_RECOMPUTE, BlockRef, Plan, kept_bytes, leaves_layer

# How often a step turns to recomputing what would be saved instead.
_CHAIN = 8


@dataclasses.dataclass(frozen=True)
class _Search:
    """What all steps share. movable: the nodes that may be recomputed; peak: bytes at a plan's predicted peak."""

    forward: Sequence[Node]
    needed: Sequence[Node]
    movable: Set[Node]
    device: str
    peak: Callable[[Plan], int]

    def settle(self, decisions: dict[Node, str]) -> Plan:
        return settle(self.forward, self.needed, decisions)

    def steps(self, decisions: dict[Node, str], plan: Plan, strictly: bool) -> Iterator[tuple[dict[Node, str], Plan]]:
        """The decisions and the plan behind every step. strictly: only steps that lower the peak."""
        turned: set[Node] = set()
        refused: set[Node] = set()
        now, at_refusal = self.peak(plan), None
        while True:
            saved = (made_by(node) for node in plan.saved if kept_bytes(node))
            groups = by_key((likeness(op), op) for op in saved if op in self.movable - turned - refused)
            best = self._cheapest(groups.values(), decisions, plan)
            if best is None:
                if not refused or len(turned) == at_refusal:
                    return
                refused, at_refusal = set(), len(turned)  # the steps taken since may have made room for them
                continue
            for node in dict.fromkeys(best):
                further, trial = self.turn(decisions, plan, node)
                then = self.peak(trial)
                if then > now or strictly and then == now:
                    refused.add(node)
                    continue
                turned.add(node)
                if trial.saved_bytes() < plan.saved_bytes():
                    decisions, plan, now = further, trial, then
                    yield decisions, plan

    def _cheapest(self, groups: Iterable[list[Node]], decisions: dict[Node, str], plan: Plan) -> list[Node] | None:
        """The group whose first value is freed at the lowest price; None where none frees anything."""
        best: tuple[float, list[Node]] | None = None
        before = costs.seconds(plan.recomputed, self.device)
        for members in groups:
            _, trial = self.turn(decisions, plan, members[0])
            freed = plan.saved_bytes() - trial.saved_bytes()
            if freed > 0:
                price = (costs.seconds(trial.recomputed, self.device) - before) / freed
                if best is None or price < best[0]:
                    best = price, members
        return best and best[1]

    def turn(self, decisions: dict[Node, str], plan: Plan, node: Node) -> tuple[dict[Node, str], Plan]:
        """The decisions and the plan with `node` recomputed and, until that frees something, what is saved instead."""
        here = set(plan.saved)
        trial, found = plan, [node]
        for _ in range(_CHAIN):
            decisions = {**decisions, **dict.fromkeys(_with_items(found), MUST_RECOMPUTE)}
            trial = self.settle(decisions)
            if trial.saved_bytes() < plan.saved_bytes():
                break
            found = [op for n in trial.saved if n not in here and (op := made_by(n)) in self.movable]
            if not found:
                break
        return decisions, trial


def solve(
    forward: Sequence[Node],
    needed: Sequence[Node],
    blocks: Mapping[Node, BlockRef],
    decisions: dict[Node, str],
    kind: str | None,
    fits: Callable[[Plan], bool],
    device: str,
    peak: Callable[[Plan], int],
    lowering: bool = False,
) -> dict[Node, str]:
    """`decisions` with as many steps taken as `fits` asks for; where it never holds, those of the lowest peak.

    forward, needed, blocks, device: as of `make_plan`; kind: whose values may be recomputed, None for all; peak: the
    bytes at a plan's predicted peak; lowering: begin with the steps that lower the peak.
    """
    fixed = selection_inputs(forward) | {n for n in forward if is_pinned(n) or leaves_layer(n, blocks)}
    movable = {n for n in forward if n not in fixed and (kind is None or blocks[n].kind == kind)}
    search = _Search(forward, needed, movable, device, peak)
    start = reached = decisions, search.settle(decisions)
    if fits(start[1]):
        return decisions
    ends = []
    # (only steps that lower the peak, from the start) of each sequence of steps.
    for strictly, anew in ((True, False), (False, False), (False, True)) if lowering else ((False, False),):
        began = start if anew else reached
        for reached in search.steps(*began, strictly):
            if fits(reached[1]):
                return reached[0]
        ends.append(reached)
    return min(ends, key=lambda end: peak(end[1]))[0]


def read_bytes(
    needed: Sequence[Node], forward: Sequence[Node], blocks: Mapping[Node, BlockRef], kind: str | None
) -> int:
    """Bytes of the forward's values that backward reads, of blocks of `kind` or of all: what a plan without any
    recomputation saves."""
    inner = set(forward)
    bases = dict.fromkeys(b for n in needed if (b := base_of(n, through_items=False)) in inner)
    return sum(kept_bytes(n) for n in bases if kind is None or blocks[n].kind == kind)


def made_by(node: Node) -> Node:
    """The op whose result, or an item of it, `node` is."""
    return through(node, {operator.getitem})


def _with_items(ops: Iterable[Node]) -> Iterator[Node]:
    """`ops` and the items of their results."""
    for op in ops:
        yield op
        yield from _with_items(u for u in op.users if u.target is operator.getitem)


def likeness(node: Node) -> tuple[object, ...]:
    """What the same value of another layer has in common with `node`."""
    name = re.sub(r"\d+", "#", module_fqn(node))
    return str(node.target), name, str(node.meta.get("val")), tuple(str(a.target)[:24] for a in node.all_input_nodes
                                                                   if a.op == "call_function")  # fmt: skip
