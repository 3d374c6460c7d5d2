"""Which values of a graph are activations, computed from the model's weights, and which are tables."""

from __future__ import annotations

import operator
from collections.abc import Set

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.views import COMPOSITE_PERMUTATIONS, REARRANGEMENTS, SHAPE_ONLY, values_read
from megacpp_compile.matchers.rope.lanes import EMPTY

aten = torch.ops.aten


def activations(graph: fx.Graph, weights: frozenset[Node]) -> set[Node]:
    """Nodes computed from weights, i.e. by the model's layers; the rest are tables, positions and masks."""
    found = _computed_from(graph, weights)
    # A buffer to be filled belongs to what is written into it.
    filled = {n for n in graph.nodes if n.target in EMPTY and value(n).is_floating_point()}
    return _computed_from(graph, weights | {n for n in filled if not _makes_tables(n, found)})


def handed_in(graph: fx.Graph, weights: frozenset[Node]) -> set[Node]:
    """Inputs that score products read through products with what is broadcast to them, as heads meet tables: behind a
    graph break queries or keys are inputs of the frame, and where they have no gradient nothing else tells them from
    tables."""
    found, seen = set[Node](), set[Node]()
    pending = [a for node in graph.nodes if node.target in _SCORES for a in node.all_input_nodes[:2]]
    while pending:
        node = pending.pop()
        if node in seen or not isinstance(value(node), torch.Tensor | tuple | list):
            continue
        seen.add(node)
        if node.op == "placeholder":
            fake = value(node)
            floats = isinstance(fake, torch.Tensor) and (fake.is_floating_point() or fake.is_complex())
            found |= {node} if floats and fake.dim() > 2 and node not in weights else set()
        elif node.target is aten.mul.Tensor and of_tensors(node):
            shape = value(node).shape
            whole = [a for a in node.all_input_nodes if _has_shape(a, shape)]
            pending += whole if len(whole) == 1 else []
        elif node.target in _LINEAR or node.target in REARRANGEMENTS or node.target in COMPOSITE_PERMUTATIONS:
            pending += node.all_input_nodes
    return found


def _has_shape(node: Node, shape: torch.Size) -> bool:
    own = value(node).shape
    return len(own) == len(shape) and all(map(same_size, own, shape))


def _computed_from(graph: fx.Graph, roots: Set[Node]) -> set[Node]:
    found = set(roots)
    for node in graph.nodes:
        if any(a in found for a in values_read(node)):
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


_SCORES = (aten.scaled_dot_product_attention.default, aten.matmul.default, aten.bmm.default, aten.einsum.default)
# What else is between a head and the products it is a sum of.
_LINEAR = {
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.cat.default, aten.stack.default, aten.slice_scatter.default, aten.select_scatter.default, operator.getitem,
    aten.view_as_complex.default, aten.view_as_real.default,
}  # fmt: skip
