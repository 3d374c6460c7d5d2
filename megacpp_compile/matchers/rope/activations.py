"""Which values of a graph are activations, computed from the model's weights, and which are tables."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import value

aten = torch.ops.aten


def activations(graph: fx.Graph, weights: frozenset[Node]) -> set[Node]:
    """Nodes computed from weights, i.e. by the model's layers; the rest are tables, positions and masks."""
    found = set(weights)
    for node in graph.nodes:
        if node.target in SHAPE_ONLY:
            # A buffer to be filled belongs to what is written into it.
            if isinstance(v := value(node), torch.Tensor) and v.is_floating_point() and node.target in _FILLED:
                found.add(node)
            continue
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
        elif node.target in _FILLED and value(node).is_floating_point():
            found.add(node)
    return found


# Ops that read a tensor's shape and dtype, not its values.
SHAPE_ONLY = {
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.empty_like.default,
    aten.zeros_like.default, aten.ones_like.default, aten.new_full.default, aten.full_like.default,
    aten.new_empty_strided.default, aten.sym_size.int,
}  # fmt: skip
_FILLED = {
    aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default, aten.new_zeros.default,
    aten.zeros.default, aten.zeros_like.default, aten.new_empty_strided.default, aten.empty_permuted.default,
}  # fmt: skip
