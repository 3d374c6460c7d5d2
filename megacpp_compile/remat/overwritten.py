"""Inputs that the forward writes (running statistics, a moving average, a counter) and backward has need of.

The write is done before backward begins. What backward reads of such an input, or computes again from it, would be of
the new value: torch's own partitioner lets that happen (2.13). Under a policy the old value is a copy that is kept.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import value

MARK = "megacpp_before_the_write"


def keep(graph: fx.Graph) -> list[Node]:
    """The copies added to `graph`, a joint one, each read in the place of an input that is written. One that backward
    has no need of is in no memory: Inductor fuses it away."""
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
