"""Which values of a graph are activations, computed from the model's weights, and which are tables."""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import of_tensors, same_shape, value
from megacpp_compile.fx.views import COMPOSITE_PERMUTATIONS, REARRANGEMENTS, SHAPE_ONLY, values_read
from megacpp_compile.fx.walks import made_from, reached
from megacpp_compile.matchers.rope.lanes import EMPTY


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
    scored = [a for node in graph.nodes if node.target in _SCORES for a in node.all_input_nodes[:2]]
    inputs = (n for n in reached(scored, _put_together) if n.op == "placeholder" and n not in weights)
    return {n for n in inputs if _is_wide(value(n))}


def _put_together(node: Node) -> list[Node]:
    """What the lanes of `node` may be lanes of."""
    if node.target is aten.mul.Tensor and of_tensors(node):
        whole = [a for a in node.all_input_nodes if same_shape(a, node)]
        return whole if len(whole) == 1 else []
    linear = node.target in _LINEAR or node.target in REARRANGEMENTS or node.target in COMPOSITE_PERMUTATIONS
    return [a for a in node.all_input_nodes if isinstance(value(a), torch.Tensor | tuple | list)] if linear else []


def _is_wide(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and (fake.is_floating_point() or fake.is_complex()) and fake.dim() > 2


def _computed_from(graph: fx.Graph, roots: Set[Node]) -> set[Node]:
    return made_from(roots, graph.nodes, values_read) | roots


def _makes_tables(buffer: Node, found: set[Node]) -> bool:
    """Whether all that `found`, which is computed from weights, does with `buffer` is to be multiplied by what is
    computed of it, such as cosines of frequencies some of which are zeros."""
    def onward(at: tuple[Node, bool]) -> list[tuple[Node, bool]]:
        others = [u for u in at[0].users if u not in found and u.target not in SHAPE_ONLY]
        return [(u, at[1] or u.target not in REARRANGEMENTS) for u in others]

    way = reached([(buffer, False)], onward)
    met = {(user, computed) for node, computed in way for user in node.users if user in found}
    return bool(met) and all(computed and user.target is aten.mul.Tensor for user, computed in met)


_SCORES = (aten.scaled_dot_product_attention.default, aten.matmul.default, aten.bmm.default, aten.einsum.default)
# What else is between a head and the products it is a sum of.
_LINEAR = {
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.cat.default, aten.stack.default, aten.slice_scatter.default, aten.select_scatter.default, operator.getitem,
    aten.view_as_complex.default, aten.view_as_real.default,
}  # fmt: skip
