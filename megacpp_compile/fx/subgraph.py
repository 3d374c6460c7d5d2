"""The part of a graph between some inputs and some outputs, as a module with the autocast switches around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile.fx.mode_states import autocast_pairs


def inside(inputs: Sequence[Node], outputs: Sequence[Node]) -> set[Node]:
    """The calls that compute `outputs` from `inputs` and from the other graph inputs they need."""
    keep, stack, border = set[Node](), list(outputs), set(inputs)
    while stack:
        node = stack.pop()
        if node not in keep and node not in border and node.op not in ("placeholder", "get_attr"):
            keep.add(node)
            stack.extend(node.all_input_nodes)
    return keep


def between(gm: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """(module, its inputs): computes `outputs` from `inputs` and from the other graph inputs they need."""
    keep, border = inside(inputs, outputs), set(inputs)
    border |= {n for node in (*keep, *outputs) for n in (*node.all_input_nodes, node)} - keep
    for switches in autocast_pairs(gm.graph):
        if any(switches[0] < node < switches[1] for node in keep):
            keep.update(switches)
    order = sorted(border)
    graph = fx.Graph()
    env = {}
    for node in order:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in sorted(keep):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in outputs))
    return GraphModule(torch.nn.Module(), graph), order
