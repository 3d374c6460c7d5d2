"""Lightning attention whose decays are inputs of the graph, as tables in buffers are: they may hold anything, and no
graph shows that they are powers of one rate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import of_tensors, value
from megacpp_compile.fx.views import EXPANSIONS, SAME_VALUES
from megacpp_compile.fx.walks import within_steps
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.recurrences import find_recurrences
from megacpp_compile.matchers.rope.activations import activations
from megacpp_compile.matchers.rope.lanes import is_one
from megacpp_compile.matchers.ssd.tensor_ops import VIEWS
from megacpp_compile.reader.links import through

_READS = VIEWS | SAME_VALUES | EXPANSIONS | {aten.slice.Tensor, aten.select.int}
_BETWEEN = 8  # nodes from the last state to the product of keys or values with a table


def given_decays(view: GraphView) -> Iterator[Node]:
    """For every lightning attention of the graph with such decays, where keys or values meet a table."""
    computed = activations(view.graph, view.weights)
    for found in find_recurrences(view.graph.nodes, computed):
        if found.kind == "lightning-attention" and (met := _table_met(found.node, computed)) is not None:
            yield met


def _table_met(state: Node, computed: set[Node]) -> Node | None:
    for node in within_steps(state, _BETWEEN, lambda n: filter(computed.__contains__, n.all_input_nodes)):
        others = [a for a in node.all_input_nodes if a not in computed]
        if node.target is aten.einsum.default and any(map(_is_given, others)):
            return node
        if node.target is aten.mul.Tensor and of_tensors(node) and any(_of_tokens(a, node) for a in others):
            return node
    return None


def _is_given(node: Node) -> bool:
    node = through(node, _READS)
    return node.op in ("placeholder", "get_attr") and isinstance(value(node), torch.Tensor)


def _of_tokens(table: Node, product: Node) -> bool:
    """Whether `table` is given, with entries for tokens and none for sequences of a batch, as masks have."""
    shape, whole = value(table).shape, value(product).shape
    alike = len(shape) == len(whole) and not is_one(shape[0])
    return len(shape) > 1 and not is_one(shape[-2]) and not alike and _is_given(table)
