"""Refuses what would decide beside the policy what backward recomputes. Checked on Dynamo's graph; projections kept in
place of an input, once the policy has decided of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from megacpp_compile._torch._registry import present
from megacpp_compile._torch.dynamo import memory_budget_of
from megacpp_compile._torch.functorch import fx_graph_cse, memory_budget, min_cut_rematerialization_partition
from megacpp_compile.config.options import Config
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import TwoPoliciesError
from megacpp_compile.frontend.checkpoint import has_regions
from megacpp_compile.fx.differentiated import trains
from megacpp_compile.fx.edit import all_nodes
from megacpp_compile.fx.provenance import is_backward, module_fqn, source_line
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.precision.checkpoint import in_stock_checkpoint
from megacpp_compile.remat.plan import MUST_RECOMPUTE, RECOMPUTE
from megacpp_compile.report.auto_plan import AutoPlan
from megacpp_compile.report.records import MissedFusion

REGION = "checkpoint-region"
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def region_budget(node: Node) -> float | None:
    """The budget of the `torch.autograd.graph.region_activation_memory_budget` that `node` was traced under, None for
    none. Torch 2.13 and newer; the partitioner heeds it in place of the global one."""
    return cast("float | None", memory_budget_of(node))


def auto_for(
    gm: GraphModule, rewritten: GraphModule | None, example_inputs: Sequence[Any], config: Config,
    patches: Mapping[str, Any],
) -> dict[str, Any] | None:  # fmt: skip
    """An `AutoPlan` as a dict, for a frame that is trained under `policy="auto"` and that the passes have changed; None
    for any other. Its reason is why the frame is left to torch's partitioner as under "none", "" where it is to be
    planned. rewritten: what the passes made of Dynamo's graph `gm`, None where they left it as it was."""
    time = config.auto_time
    if time is None or rewritten is None or is_backward(gm) or not trains(example_inputs):
        return None
    return asdict(AutoPlan(reason=_decides(gm, rewritten, patches), allowed=time))


def _decides(gm: GraphModule, rewritten: GraphModule, patches: Mapping[str, Any]) -> str:
    """Who decides already what is recomputed, by a checkpoint, a budget, a partitioner or a projection kept in place of
    an input; "" where nobody does."""
    if has_regions(gm):
        return "torch.utils.checkpoint in the model decides"
    if (budget := memory_budget()) != 1.0:
        return f"torch's activation_memory_budget = {budget} decides"
    if _regional(all_nodes(gm)) is not None:
        return "torch's region_activation_memory_budget decides"
    from megacpp_compile._torch.inductor import CustomPartitionerFn
    from megacpp_compile._torch.inductor import config as inductor_config

    if not present(min_cut_rematerialization_partition, fx_graph_cse, CustomPartitionerFn):
        return f"torch {torch.__version__} has none of the partitioner's parts that a plan is made with"
    name = "custom_partitioner_fn"
    if patches.get(name, getattr(inductor_config, name, None)):
        return f"Inductor's {name} decides"
    # A plan that recomputed the input would undo it (`check_decisions`).
    projects = (n for n in all_nodes(rewritten) if traits_of(n).kept_instead is not None)
    op = next(projects, None)
    return "" if op is None else f"{name_of(op)} keeps a projection in place of its input (the option 'compress')"


def _regional(nodes: Sequence[Node]) -> float | None:
    """The first of torch's memory budgets around these nodes, None where there is none."""
    return next((found for n in nodes if (found := region_budget(n)) is not None), None)


def check(gm: GraphModule, config: Config) -> None:
    """Raise TwoPoliciesError where torch's memory budget is set beside a policy.

    Regions under `torch.utils.checkpoint` are honoured: backward recomputes all of them. `strict` refuses them too.
    """
    if config.own_policy is not None:
        budget = memory_budget()
        if budget != 1.0:
            raise TwoPoliciesError(
                f"torch._functorch.config.activation_memory_budget = {budget}", "set it to 1.0, or drop the policy"
            )
        nodes = all_nodes(gm)
        regional = _regional(nodes)
        if regional is not None:
            # Whether or not activation_memory_budget_require_full_coverage has it cover all of the frame.
            raise TwoPoliciesError(
                f"torch.autograd.graph.region_activation_memory_budget({regional}) inside the compiled model",
                "remove it, or drop the policy",
            )
        if config.strict and any(n.target is _CHECKPOINT for n in nodes):
            raise TwoPoliciesError(
                "torch.utils.checkpoint inside the compiled model", "remove the call, or compile without 'strict'"
            )


def overruled(gm: GraphModule, config: Config) -> list[MissedFusion]:
    """What the report has of each region of `torch.utils.checkpoint` in a frame that is trained, or around it, where a
    policy or a budget of torch's was asked for: it decides nothing there. Warned of once, too."""
    asked = "options['policy']" if config.own_policy is not None else ""
    if not asked and (memory_budget() != 1.0 or _regional(all_nodes(gm)) is not None):
        asked = "torch's memory budget"
    calls = [n for n in all_nodes(gm) if n.target is _CHECKPOINT] if asked else []
    around = bool(asked) and not calls and in_stock_checkpoint()
    reason = f"torch.utils.checkpoint in the model decides what backward recomputes here, and {asked} nothing"
    found = [MissedFusion("policy", module_fqn(n), source_line(n), n.name, REGION, reason) for n in calls]
    if around:
        found = [MissedFusion("policy", "", "", "", REGION, reason.replace("here", "of the whole frame"))]
    if found:
        where = found[0].fqn or found[0].source or "a compiled frame"
        warn_once(
            f"torch.utils.checkpoint decides what backward recomputes of {where}{' and others' * (len(found) > 1)}, "
            f"and {asked} nothing: take the checkpoints out of the model (as by gradient_checkpointing_disable() or "
            f"without a checkpoint wrapper), or leave {asked} at its default. The report lists them."
        )
    return found


def check_decisions(decisions: Mapping[Node, str]) -> None:
    """Raise TwoPoliciesError for an op that keeps a projection of an input which the policy has backward recompute, or
    that it recomputes itself: either saves nothing, and the gradient would be approximate all the same."""
    again = (RECOMPUTE, MUST_RECOMPUTE)
    for node, decision in decisions.items():
        instead = traits_of(node).kept_instead
        if instead is None:
            continue
        source = base_of(node.args[instead])  # type: ignore[arg-type]
        if decision in again or decisions.get(source) in again:
            where = module_fqn(node) or node.name
            raise TwoPoliciesError(
                f"{name_of(node)} of {where}, which keeps a projection of what the policy recomputes",
                "leave its name out of the option 'compress', or give the kind of its block the entry 'none'",
            )
