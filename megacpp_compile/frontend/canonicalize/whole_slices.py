"""Slices of a whole dimension are what they slice: `x[:, :, :n]` names dimensions it does not cut.

Before: `slice(slice(x, 0, 0, maxint), 2, 0, n)`          After: `slice(x, 2, 0, n)`
Torch drops such slices itself where sizes are numbers; with symbolic sizes torch 2.9 records them.
"""

from __future__ import annotations

import sys

import torch
from torch import fx


def whole_slices(graph: fx.Graph) -> int:
    """Give their readers what they slice; returns how many. What is an output stays: it must not become an input."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        start, end, step = (*node.args[2:], None, None, None)[:3]
        whole = start in (None, 0) and (end is None or end == sys.maxsize) and step in (None, 1)
        if whole and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            count += 1
    return count
