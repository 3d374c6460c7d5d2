"""Activation-checkpoint regions, inlined with their tags.

Dynamo wraps a checkpointed block in the higher-order op `tag_activation_checkpoint`, which pre-dispatch tracing cannot
see into. To the compiler it is a tag on the block's nodes, and tags survive tracing: the body is inlined and tagged
here, passes fire inside it, and the partitioner recomputes what it would have recomputed.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.frontend.selective_checkpoint import decide
from megacpp_compile.fx.edit import all_nodes, attribute_of

HOP = torch.ops.higher_order.tag_activation_checkpoint
TAGS = ("recompute", "ac_graph_id")
_CALLS = ("call_function", "call_method", "call_module")
_ids = itertools.count(1 << 20)  # away from the ids torch itself hands out within one graph


def inline_checkpoints(gm: GraphModule, mode: FakeTensorMode) -> GraphModule:
    """`gm` itself where there is no checkpoint region, else a copy with all of them inlined.

    Raises CaptureError for a selective region (`context_fn`) that cannot be asked what it saves.
    """
    if not any(n.target is HOP for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    env: dict[Node, Node] = {}
    out = GraphModule(gm, gm.graph)  # shares the submodules; its own attribute table
    out.meta.update(gm.meta)
    for node in gm.graph.nodes:
        if node.target is HOP:
            env[node] = _inline(node, gm, out, graph, env, node.name, mode)  # type: ignore[assignment]
        elif node.op == "output":
            graph.output(_map(node.args[0], env))
        else:
            _copy(node, graph, env)
    out.graph = graph
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)  # the bodies; anything else without readers may be an in-place op
    out.recompile()
    return out


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


def _copy(node: Node, graph: fx.Graph, env: dict) -> Node:  # type: ignore[type-arg]
    """Copy one node; a getitem on an inlined region's outputs is the output itself."""
    if node.op == "call_function" and isinstance(source := env.get(node.args[0] if node.args else None), tuple):
        env[node] = source[node.args[1]]  # type: ignore[index]
        return env[node]
    new = graph.node_copy(node, lambda n: env[n])
    for name in ("_dynamo_source",):
        if hasattr(node, name):
            setattr(new, name, getattr(node, name))
    env[node] = new
    return new


def _map(value, env):  # type: ignore[no-untyped-def]
    return fx.map_arg(value, lambda n: env[n])


def _inline(  # type: ignore[no-untyped-def]
    node: Node, owner: GraphModule, out: GraphModule, graph: fx.Graph, env: dict, prefix: str, mode: FakeTensorMode  # type: ignore[type-arg]
):  # fmt: skip
    body_ref, *args = node.args
    body = getattr(owner, str(body_ref.target))  # type: ignore[union-attr]
    decided = {}
    if (context_fn := body.meta.get("_checkpoint_context_fn")) is not None:
        decided = decide(body, context_fn, fx.map_arg(args, lambda n: n.meta["example_value"]), mode)
    inner: dict = {}  # type: ignore[type-arg]
    region, values = next(_ids), iter(args)
    result = None
    for n in body.graph.nodes:
        if n.op == "placeholder":
            inner[n] = _map(next(values), env)
        elif n.op == "output":
            result = _map(n.args[0], inner)
        elif n.target is HOP:
            inner[n] = _inline(n, body, out, graph, inner, f"{prefix}_{n.name}", mode)
        else:
            new = _copy(n, graph, inner)
            if n.op == "get_attr":
                attribute = f"{prefix}_{n.target}".replace(".", "_")
                setattr(out, attribute, attribute_of(body, str(n.target)))
                new.target = attribute
            if isinstance(new, Node) and new.op in _CALLS and "recompute" not in new.meta:
                new.meta["recompute"] = decided.get(n, CheckpointPolicy.PREFER_RECOMPUTE)
                new.meta["ac_graph_id"] = region
    return tuple(result) if isinstance(result, (tuple, list)) else result
