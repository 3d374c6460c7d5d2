"""The forward and the backward nodes of a joint graph."""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from megacpp_compile.fx.walks import made_from


def joint(graph: fx.Graph) -> tuple[list[Node], list[Node]]:
    """The forward's call nodes in graph order, and those of them that backward nodes read: none without a backward."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    backward = backward_nodes(graph)
    forward = [n for n in calls if n not in backward]
    inner = set(forward)
    read = dict.fromkeys(a for n in calls if n in backward for a in n.all_input_nodes if a in inner)
    return forward, list(read)


def backward_nodes(graph: fx.Graph) -> set[Node]:
    """The tangents, the nodes that depend on one, and those that autograd traced for backward only."""
    nodes = [n for n in graph.nodes if n.op != "output"]
    late = {n for n in nodes if n.op == "placeholder" and "tangents" in str(n.target)}
    late |= {n for n in nodes if n.meta.get("partitioner_tag") == "is_backward"}
    return late | made_from(late, nodes)
