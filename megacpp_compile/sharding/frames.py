"""Layouts of the parameters a frame takes, as a `ShardingPlan` says, before anything is compiled for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from megacpp_compile.config.sharding import ShardingPlan
from megacpp_compile.sharding.pinning import SiblingParams, pin_frame


def pin_for_frame(
    plan: ShardingPlan, gm: GraphModule, inputs: Sequence[Any], ops: Iterable[tuple[str, Node]],
    rewritten: GraphModule | None, whole: bool, sibling_params: SiblingParams | None,
) -> dict[str, Any]:  # fmt: skip
    """Pin what the frame's parameters are fused into, and gather in its graphs what is cut over an axis of the batch.
    Returns the frame's entry in the report: the mesh, and a row for each parameter that was pinned.

    gm, inputs: Dynamo's graph and what it is called with; rewritten: the graph with the ops, if any was put in place;
    the others: as in `pin_frame`, which raises the errors.
    """
    pinned, specs = pin_frame(plan, gm, inputs, ops, whole and sibling_params is None, sibling_params)
    if plan.batch:
        from megacpp_compile.sharding.layout import gather

        for graph in (gm, rewritten) if rewritten is not None else (gm,):
            gather(plan, graph, specs)
    return {"mesh": dict(plan.mesh), "pinned": [row.to_dict() for row in pinned]}
