"""Which values of a graph are activations, computed from the model's weights, and which are tables."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import REARRANGEMENTS
from megacpp_compile.matchers.rope.lanes import EMPTY

aten = torch.ops.aten


def activations(graph: fx.Graph, weights: frozenset[Node]) -> set[Node]:
    """Nodes computed from weights, i.e. by the model's layers; the rest are tables, positions and masks."""
    found = _computed_from(graph, weights)
    # A buffer to be filled belongs to what is written into it.
    filled = {n for n in graph.nodes if n.target in EMPTY and value(n).is_floating_point()}
    return _computed_from(graph, weights | {n for n in filled if not _makes_tables(n, found)})


def _computed_from(graph: fx.Graph, roots: Set[Node]) -> set[Node]:
    found = set(roots)
    for node in graph.nodes:
        read = node.args[:1] if node.target in _LIKE else node.all_input_nodes
        if node.target not in SHAPE_ONLY and any(a in found for a in read):
            found.add(node)
    return found


def _makes_tables(buffer: Node, found: set[Node]) -> bool:
    """Whether all that `found`, which is computed from weights, does with `buffer` is to be multiplied by what is
    computed of it, such as cosines of frequencies some of which are zeros."""
    pending, seen = [(buffer, False)], set[tuple[Node, bool]]()
    multiplied = False
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        node, computed = at
        for user in node.users:
            if user in found:
                if not computed or user.target is not aten.mul.Tensor:
                    return False
                multiplied = True
            elif user.target not in SHAPE_ONLY:
                pending.append((user, computed or user.target not in REARRANGEMENTS))
    return multiplied


# Ops that read a tensor's shape and dtype, not its values.
SHAPE_ONLY = {
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.empty_like.default,
    aten.zeros_like.default, aten.ones_like.default, aten.new_full.default, aten.full_like.default,
    aten.new_empty_strided.default, aten.sym_size.int,
}  # fmt: skip
# Of the second tensor, these read the same.
_LIKE = {aten.type_as.default, aten.expand_as.default, aten.view_as.default, aten.reshape_as.default}
