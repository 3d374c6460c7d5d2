"""Slices of a whole dimension are what they slice: `x[:, :, :n]` names dimensions it does not cut, and `x[-n:]` cuts
nothing of n rows.

Before: `slice(slice(x, 0, 0, maxint), 2, 0, n)`          After: `slice(x, 2, 0, n)`
Torch drops the first kind itself where sizes are numbers; with symbolic sizes torch 2.9 records them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.fx.edit import replace, value


def whole_slices(graph: fx.Graph) -> int:
    """Give their readers what they slice; returns how many. What is an output stays: it must not become an input."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        start, end, step = (*node.args[2:], None, None, None)[:3]
        whole = (end is None or end == sys.maxsize) and step in (None, 1) and (start in (None, 0) or _all(node, start))
        if whole and not any(user.op == "output" for user in node.users):
            replace(node, node.args[0])
            count += 1
    return count


def _all(node: fx.Node, start: Any) -> bool:
    """Whether the last `-start` entries are all there are."""
    fake = value(node.args[0])
    if not isinstance(fake, torch.Tensor):
        return False
    size = fake.shape[node.args[1] if len(node.args) > 1 else 0]  # type: ignore[index]
    return statically_known_true(value(start) + size == 0)
