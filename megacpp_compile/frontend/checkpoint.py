"""Activation-checkpoint regions, inlined with their tags.

Dynamo wraps a checkpointed block in the higher-order op `tag_activation_checkpoint`, which pre-dispatch tracing cannot
see into. To the compiler it is a tag on the block's nodes, and tags survive tracing: the body is inlined and tagged
here, passes fire inside it, and the partitioner recomputes what it would have recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.frontend.selective_checkpoint import decide
from megacpp_compile.fx.edit import all_nodes
from megacpp_compile.fx.inlining import inlined

HOP = torch.ops.higher_order.tag_activation_checkpoint
TAGS = ("recompute", "ac_graph_id")
_CALLS = ("call_function", "call_method", "call_module")
_ids = itertools.count(1 << 20)  # away from the ids torch itself hands out within one graph


def inline_checkpoints(gm: GraphModule, mode: FakeTensorMode) -> GraphModule:
    """`gm` itself where there is no checkpoint region, else a copy with all of them inlined.

    Raises CaptureError for a selective region (`context_fn`) that cannot be asked what it saves.
    """

    def entering(call: Node, body: GraphModule) -> Callable[[Node, Node], object]:
        decided, region = dict[Node, CheckpointPolicy](), next(_ids)
        if (context_fn := body.meta.get("_checkpoint_context_fn")) is not None:
            examples = fx.map_arg(call.args[1:], lambda n: n.meta["example_value"])
            decided = decide(body, context_fn, examples, mode)

        def tag(node: Node, copy: Node) -> None:
            if copy.op in _CALLS and "recompute" not in copy.meta:
                copy.meta["recompute"] = decided.get(node, CheckpointPolicy.PREFER_RECOMPUTE)
                copy.meta["ac_graph_id"] = region

        return tag

    return inlined(gm, HOP, 1, entering)


def has_regions(gm: GraphModule) -> bool:
    """Whether there is a checkpoint region in `gm`, inlined or not."""
    return any(n.target is HOP or "ac_graph_id" in n.meta for n in all_nodes(gm))


def checkpoint_tags(graph: fx.Graph) -> tuple[tuple[int, int, int], ...]:
    """(place, number of the region, policy) of each node in a checkpoint region; regions are numbered as they come."""
    regions: dict[int, int] = {}
    return tuple(
        (i, regions.setdefault(n.meta.get("ac_graph_id", -1), len(regions)), n.meta["recompute"].value)
        for i, n in enumerate(graph.nodes) if "recompute" in n.meta
    )  # fmt: skip
