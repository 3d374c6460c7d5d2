"""The policy as a pass over the joint graph: Inductor's `joint_custom_post_pass`, the last one before partitioning.

Torch's partitioner obeys the tags that `torch.utils.checkpoint` puts on nodes, orders recomputation the way autograd
would run, and makes random numbers come out the same; so the plan is handed over as those tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy as Tag

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.fx.inductor_pass import GraphPass
from megacpp_compile.remat import costs, latents, offload, overwritten
from megacpp_compile.remat import planner as planning
from megacpp_compile.remat.joint_graph import joint
from megacpp_compile.remat.kinds import BlockRef, places
from megacpp_compile.remat.nodes import base_of, is_view
from megacpp_compile.remat.peak import ALONE, Liveness, StepContext

# One region for the whole graph: torch would save what lies on the border of two.
_REGION = 1 << 19

# Told the plan, where the nodes are, and the plan's predicted peak, see `report.Frame`.
OnPlan = Callable[[planning.Plan, dict[Node, BlockRef], dict[str, Any]], None]


class TagForRemat(GraphPass):
    """Tag forward nodes MUST_SAVE or MUST_RECOMPUTE as `policy` has it.

    on_plan: given what was decided; not called where the compiled code comes from a cache.
    around: what the graph shares the device with; it counts for a limit on the peak alone.
    """

    def __init__(
        self,
        policy: CheckpointingPolicy,
        block_kinds: dict[str, str],
        before: Any = None,
        on_plan: OnPlan | None = None,
        around: StepContext = ALONE,
    ) -> None:
        self.policy, self.block_kinds, self.before, self.on_plan, self.around = (
            policy,
            block_kinds,
            before,
            on_plan,
            around,
        )

    def run(self, graph: fx.Graph) -> None:
        forward, needed = joint(graph)
        if not needed:
            return  # inference, or nothing to differentiate
        if kept := overwritten.keep(graph):
            forward, needed = joint(graph)
        where = places(forward, self.block_kinds)
        plan = planning.make(forward, needed, where, self.policy, _device(forward), self.around)
        away = offload.chosen(plan, where, self.policy)
        found = predicted(graph, plan, away, self.policy, self.around) if self.on_plan is not None else {}
        added = latents.pass_on(graph, plan.recomputed)
        for node in [*plan.saved, *kept]:
            if isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
                node.meta["recompute"] = Tag.MUST_SAVE
        for node in [*away, *self.around.passed_on(graph, self.policy)]:
            node.meta[offload.MARK] = True
        for node in [*plan.recomputed, *added]:
            node.meta["recompute"], node.meta["ac_graph_id"] = Tag.MUST_RECOMPUTE, _REGION
        if self.on_plan is not None:
            self.on_plan(plan, where, found)

    def key(self) -> tuple[Any, ...]:
        around = repr(self.around) if self.policy.peak_gib is not None or self.policy.offload != "none" else ""
        return repr(self.policy), tuple(sorted(self.block_kinds.items())), around

    def __reduce__(self) -> Any:
        return TagForRemat, (self.policy, self.block_kinds, self.before, None, self.around)


def predicted(
    graph: fx.Graph, plan: planning.Plan, away: list[Node], policy: CheckpointingPolicy, around: StepContext
) -> dict[str, Any]:
    """Bytes at the peak of a step, see `report.Frame.peak`."""
    found, before = Liveness(graph)(plan, set(away)), around.before(graph)
    step = found.of(around.copies, bool(around.passed_on(graph, policy)))
    return {
        "before": before,
        "step": step,
        "predicted": before + step,
        "transient": found.of() - found.saved,
        "limit": None if policy.peak_gib is None else int(policy.peak_gib * 2**30),
    }


def recompute_views(graph: fx.Graph, and_of: frozenset[Any] = frozenset()) -> None:
    """Tag a joint graph so that backward reads views anew from what they are views of, and all else as it was. A graph
    with a checkpointed block has its tags, and is left to them. and_of: ops whose results are made anew like views."""
    forward, _ = joint(graph)
    if any("recompute" in node.meta for node in forward):
        return
    for node in forward:
        if is_view(node) or node.target in and_of:
            node.meta["recompute"], node.meta["ac_graph_id"] = Tag.MUST_RECOMPUTE, _REGION
        elif isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            node.meta["recompute"] = Tag.MUST_SAVE


def describe(
    plan: planning.Plan, where: dict[Node, BlockRef], policy: CheckpointingPolicy
) -> dict[str, dict[str, Any]]:
    """The plan in numbers, by kind of block; "" for what lies between blocks. See `report.Frame.remat`."""
    found: dict[str, dict[str, Any]] = {}
    blocks: dict[str, set[tuple[str, str | None]]] = {}
    for place in where.values():
        blocks.setdefault(place.kind, set()).add((place.layer, place.block))
    layered = len({p.layer for p in where.values() if p.kind and p.layer}) > 1
    away = set(offload.chosen(plan, where, policy))
    _, needed = joint(next(iter(where)).graph) if where else ([], [])
    kept = set(plan.saved) | set(plan.free)
    read = {b for n in needed if (b := base_of(n, through_items=False)) in where and b not in kept}
    device = _device(list(where))
    for kind in (k for k in ("ablock", "mblock", "eblock", "rblock", "") if k in blocks):
        entries = [policy.asked(kind, False), *([policy.asked(kind, True)] if layered else [])] if kind else []
        saved = [n for n in plan.saved if where[n].kind == kind]
        found[kind] = {
            "entries": list(dict.fromkeys(map(str, entries))),
            "blocks": len(blocks[kind]) if kind else 0,
            "saved": sum(planning.kept_bytes(n) for n in saved if n not in away),
            "offloaded": sum(planning.kept_bytes(n) for n in saved if n in away),
            "again": sum(planning.kept_bytes(n) for n in read if where[n].kind == kind),
            "recomputed": sum(where[n].kind == kind and not is_view(n) for n in plan.recomputed),
            "seconds": costs.seconds([n for n in plan.recomputed if where[n].kind == kind], device)
            + 2 * sum(planning.kept_bytes(n) for n in saved if n in away) / costs.TO_MAIN_MEMORY,
        }
    return found


def _device(forward: list[Node]) -> str:
    held = (n.meta.get("val") for n in reversed(forward))
    return next((v.device.type for v in held if isinstance(v, torch.Tensor)), "cpu")
