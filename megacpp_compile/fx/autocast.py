"""Autocast regions of a graph: the calls that enter and leave one, in pairs."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from megacpp_compile.errors import CaptureError

ENTER, LEAVE = torch.amp._enter_autocast, torch.amp._exit_autocast


def pairs(graph: Graph) -> list[tuple[Node, Node]]:
    """Every region's (entry, exit), in the order of the exits.

    Raises CaptureError for regions that are not closed, or not innermost first.
    """
    found, opened = [], list[Node]()
    for node in graph.nodes:
        if node.target is ENTER:
            opened.append(node)
        elif node.target is LEAVE:
            if not opened or node.args[0] is not opened[-1]:
                raise CaptureError("autocast regions of the frame overlap")
            found.append((opened.pop(), node))
    if opened:
        raise CaptureError("an autocast region of the frame is not closed in it")
    return found
