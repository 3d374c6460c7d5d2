"""Copies of inputs that the forward overwrites (running statistics, a moving average, a counter) and backward reads.

The forward writes before backward begins, so backward would read the new value of such an input, or recompute from it:
torch's own partitioner lets that happen (2.13). Under a policy the forward saves a copy of the old value.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import value

MARK = "megacpp_before_the_write"


def keep(graph: fx.Graph) -> list[Node]:
    """Have every reader of an overwritten input in the joint `graph` read a copy of it; the copies. Inductor fuses away
    a copy that backward does not read."""
    added = []
    for node in list(graph.nodes):
        writes = {u for u in node.users if u.target is torch.ops.aten.copy_.default and u.args[0] is node}
        if node.op != "placeholder" or not writes:
            continue
        readers = [u for u in node.users if u not in writes and u.op != "output"]
        if not readers:
            continue
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        with value(node).fake_mode:
            copy.meta["val"] = value(node).clone()
        copy.meta[MARK] = True
        for reader in readers:
            reader.replace_input_with(node, copy)
        added.append(copy)
    return added
