"""Nearby ancestors of a node, which near misses are reported with."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value

_NEAR = 24  # nodes to look at


def computed_from(node: Any) -> list[Node]:
    """`node` and what it is computed from in a few steps, tensors alone."""
    found = [node] if isinstance(node, Node) else []
    for n in found:
        if len(found) < _NEAR and n.op == "call_function":
            found += [m for m in n.all_input_nodes if m not in found]
    return [n for n in found if n.op == "call_function" and isinstance(value(n), torch.Tensor)]
