"""Hands a plan to torch's partitioner: a pass over the joint graph, Inductor's `joint_custom_post_pass`.

The partitioner obeys the tags that `torch.utils.checkpoint` puts on nodes, orders recomputation the way autograd would
run it, and replays random state. So a plan is written as those tags. The pass is the last one before partitioning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy as Tag

from megacpp_compile.config.checkpointing import KINDS, OPERATIONS, CheckpointingPolicy
from megacpp_compile.fx.inductor_pass import GraphPass
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.fx.views import is_view
from megacpp_compile.remat import costs, latents, offload, overwritten
from megacpp_compile.remat.decisions import selection_inputs
from megacpp_compile.remat.joint_graph import joint
from megacpp_compile.remat.kinds import blocks_of
from megacpp_compile.remat.nodes import is_selection
from megacpp_compile.remat.peak import Peak, PeakModel
from megacpp_compile.remat.plan import ALONE, BlockRef, Plan, StepContext, kept_bytes, last_layer
from megacpp_compile.remat.planner import make_plan
from megacpp_compile.report import stages
from megacpp_compile.report.records import Frame

# One checkpointed region for the whole graph: torch would save the values that pass between two.
_REGION = 1 << 19
_LEVELS = 256  # of a step's bytes over time that a report holds, about

# Called with the plan, the block of every forward node, and the predicted peak (`report.Frame.peak`).
OnPlan = Callable[[Plan, dict[Node, BlockRef], dict[str, Any]], None]


class TagForRemat(GraphPass):
    """Tags forward nodes MUST_SAVE or MUST_RECOMPUTE as `policy` has it.

    block_kinds: glob over module names -> kind of block; before: the user's own pass, which runs first; on_plan: not
    called where the compiled code comes from a cache; around: what the graph shares the device with, for a limit on the
    peak.
    """

    def __init__(
        self,
        policy: CheckpointingPolicy,
        block_kinds: dict[str, str],
        before: Any = None,
        on_plan: OnPlan | None = None,
        around: StepContext = ALONE,
    ) -> None:
        self.policy, self.block_kinds, self.before = policy, block_kinds, before
        self.on_plan, self.around = on_plan, around

    @stages.stage("plan")
    def run(self, graph: fx.Graph) -> None:
        forward, needed = joint(graph)
        if not needed:
            return  # inference, or nothing to differentiate
        if kept := overwritten.keep(graph):
            forward, needed = joint(graph)
        blocks = blocks_of(forward, self.block_kinds)
        plan = make_plan(forward, needed, blocks, self.policy, _device(forward), self.around)
        away = offload.offloaded(plan, blocks, self.policy)
        found = predicted(graph, plan, away, self.policy, self.around) if self.on_plan is not None else {}
        tag(graph, plan, kept)
        for node, layer in (away | dict.fromkeys(self.around.passed_on(graph, self.policy), "")).items():
            node.meta[offload.MARK] = layer
        if self.on_plan is not None:
            self.on_plan(plan, blocks, found)

    def key(self) -> tuple[Any, ...]:
        around = repr(self.around) if self.policy.peak_gib is not None or self.policy.offload != "none" else ""
        return repr(self.policy), tuple(sorted(self.block_kinds.items())), around

    def __reduce__(self) -> Any:
        return TagForRemat, (self.policy, self.block_kinds, self.before, None, self.around)


class KeepChoices(GraphPass):
    """Without a policy: tags a router's choice in a user's checkpoint region, and the scores it is made from, so that
    backward does not choose a second time. The rest of a region is the user's."""

    def run(self, graph: fx.Graph) -> None:
        keep_choices(graph)


def tag(graph: fx.Graph, plan: Plan, kept: Sequence[Node]) -> None:
    """Write `plan` as tags. kept: copies that are saved of what the forward overwrites."""
    added = latents.pass_on(graph, plan.recomputed)
    for node in [*plan.saved, *kept]:
        if isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            node.meta["recompute"] = Tag.MUST_SAVE
        if node.target is operator.getitem and is_selection(node.args[0]):  # type: ignore[arg-type]
            # Its own tag may be that of a user's region, and decides whether the choice is made again.
            node.args[0].meta["recompute"] = Tag.MUST_SAVE  # type: ignore[union-attr]
    for node in [*plan.recomputed, *added]:
        node.meta["recompute"], node.meta["ac_graph_id"] = Tag.MUST_RECOMPUTE, _REGION


def keep_choices(graph: fx.Graph) -> None:
    """Tag the selections in checkpoint regions of a joint graph, and what they choose from, to be saved."""
    forward, _ = joint(graph)
    regional = [n for n in forward if "recompute" in n.meta and "ac_graph_id" in n.meta]
    chosen_from = selection_inputs(regional)
    for node in regional:
        selected = node.target is operator.getitem and is_selection(node.args[0])  # type: ignore[arg-type]
        if is_selection(node) or selected or node in chosen_from:
            node.meta["recompute"] = Tag.MUST_SAVE


def predicted(
    graph: fx.Graph, plan: Plan, away: Mapping[Node, str], policy: CheckpointingPolicy, around: StepContext
) -> dict[str, Any]:
    """The predicted peak of a step in bytes, as `report.Frame.peak` has it. away: offloaded values: their layers."""
    found, before = PeakModel(graph)(plan, away), around.before(graph)
    step = found.of(around.copies, bool(around.passed_on(graph, policy)))
    return {
        "before": before,
        "step": step,
        "predicted": before + step,
        "transient": found.of() - found.saved,
        "limit": None if policy.peak_gib is None else int(policy.peak_gib * 2**30),
        "over_time": _over_time(found, step - found.of()),
    }


def _over_time(found: Peak, others: int) -> dict[str, list[int]]:
    """The bytes of a step over time, the most of neighbours where there are many. others: bytes that equal graphs hold
    meanwhile."""
    group = -(-sum(map(len, found.over_time)) // _LEVELS)
    joined = ([max(run[i : i + group]) + others for i in range(0, len(run), group)] for run in found.over_time)
    return dict(zip(("forward", "backward"), joined, strict=True))


def recompute_views(graph: fx.Graph, and_of: frozenset[Any] = frozenset()) -> None:
    """Tag a joint graph so that backward recomputes views, and results of the ops `and_of`, and saves all else. A graph
    with tags of `torch.utils.checkpoint` is left as it is."""
    forward, _ = joint(graph)
    if any("recompute" in node.meta for node in forward):
        return
    for node in forward:
        if is_view(node) or node.target in and_of:
            node.meta["recompute"], node.meta["ac_graph_id"] = Tag.MUST_RECOMPUTE, _REGION
        elif isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            node.meta["recompute"] = Tag.MUST_SAVE


def noted_in(frame: Frame, policy: CheckpointingPolicy | None) -> OnPlan:
    """What notes a plan and its predicted peak in `frame`. policy: the user's; None under "auto"."""

    def on_plan(plan: Plan, blocks: dict[Node, BlockRef], peak: dict[str, Any]) -> None:
        frame.remat, frame.peak = describe(plan, blocks, policy or CheckpointingPolicy()), peak

    return on_plan


def describe(plan: Plan, blocks: dict[Node, BlockRef], policy: CheckpointingPolicy) -> dict[str, dict[str, Any]]:
    """The plan in numbers, by kind of block; "" stands for nodes between blocks. See `report.Frame.remat`."""
    found: dict[str, dict[str, Any]] = {}
    by_kind: dict[str, set[tuple[str, str | None]]] = {}
    for block in blocks.values():
        by_kind.setdefault(block.kind, set()).add((block.layer, block.block))
    layered = last_layer(blocks.values()) is not None
    away = set(offload.offloaded(plan, blocks, policy))
    _, needed = joint(next(iter(blocks)).graph) if blocks else ([], [])
    kept = set(plan.saved) | set(plan.free)
    read = {b for n in needed if (b := base_of(n, through_items=False)) in blocks and b not in kept}
    device = _device(list(blocks))
    for kind in (k for k in (*KINDS, "") if k in by_kind):
        entries = [policy.asked(kind, False), *([policy.asked(kind, True)] if layered else [])] if kind else []
        if any(b.kind == kind and b.repeated for b in blocks.values()) and kind:
            entries.append(f"{policy.asked(kind, False, True)} in the loop over depth")
        entries += [f"recompute {name}" for name in policy.recompute if kind == OPERATIONS[name]]
        saved = [n for n in plan.saved if blocks[n].kind == kind]
        found[kind] = {
            "entries": list(dict.fromkeys(map(str, entries))),
            "blocks": len(by_kind[kind]) if kind else 0,
            "saved": sum(kept_bytes(n) for n in saved if n not in away),
            "offloaded": sum(kept_bytes(n) for n in saved if n in away),
            "again": sum(kept_bytes(n) for n in read if blocks[n].kind == kind),
            "recomputed": sum(blocks[n].kind == kind and not is_view(n) for n in plan.recomputed),
            "seconds": costs.seconds([n for n in plan.recomputed if blocks[n].kind == kind], device)
            + 2 * sum(kept_bytes(n) for n in saved if n in away) / costs.TO_MAIN_MEMORY,
        }
    return found


def _device(forward: list[Node]) -> str:
    held = (n.meta.get("val") for n in reversed(forward))
    return next((v.device.type for v in held if isinstance(v, torch.Tensor)), "cpu")
