"""The forward and the backward nodes of a joint graph."""

from __future__ import annotations

from torch import fx
from torch.fx import Node


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
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        late = tangent or node.meta.get("partitioner_tag") == "is_backward"
        if node.op != "output" and (late or any(a in found for a in node.all_input_nodes)):
            found.add(node)
    return found
