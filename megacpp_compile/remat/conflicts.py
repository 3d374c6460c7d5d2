"""Refuses what would decide beside the policy what backward recomputes. Checked on Dynamo's graph."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from megacpp_compile.config.options import Config
from megacpp_compile.errors import TwoPoliciesError

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def check(gm: GraphModule, config: Config) -> None:
    """Raise TwoPoliciesError where torch's memory budget is set beside a policy.

    Regions under `torch.utils.checkpoint` are honoured: backward recomputes all of them. `strict` refuses them too.
    """
    if config.policy is not None:
        budget = torch._functorch.config.activation_memory_budget
        if budget != 1.0:
            raise TwoPoliciesError(
                f"torch._functorch.config.activation_memory_budget = {budget}", "set it to 1.0, or drop the policy"
            )
        if config.strict and any(
            n.target is _CHECKPOINT for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes
        ):
            raise TwoPoliciesError(
                "torch.utils.checkpoint inside the compiled model", "remove the call, or compile without 'strict'"
            )
