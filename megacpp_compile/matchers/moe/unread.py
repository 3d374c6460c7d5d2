"""Experts that nothing here could read: their weights are multiplied, and chosen from, in some other form.

Said only where no other reason was given nearby, so that no layer of experts is passed over in silence.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.moe.routing import number_of_scores
from megacpp_compile.matchers.views import RESHAPES, is_cast
from megacpp_compile.passes._moe_rewrite import between
from megacpp_compile.passes._rule import Match

aten = torch.ops.aten
_PRODUCTS = ("bmm", "matmul", "mm", "addmm", "baddbmm", "linear", "einsum", "_grouped_mm", "grouped_mm_fallback")
_TAKEN = (
    *RESHAPES, aten.transpose.int, aten.t.default, aten.permute.default, aten.select.int, aten.index.Tensor,
    aten.index_select.default, aten.embedding.default, aten.alias.default, aten.clone.default, aten.contiguous.default,
    aten.unbind.int, aten.slice.Tensor,
)  # fmt: skip
_NEAR = 48  # nodes to look at around one


def find(
    view: GraphView, found: Sequence[Match | MatchFailure], in_doubt: Iterable[MatchFailure]
) -> Iterator[MatchFailure]:
    """`found`: what was said of the graph already; `in_doubt`: what is to be said where that does not cover it."""
    for doubt in in_doubt:
        around = _around(doubt.node)
        if not any(
            doubt.node in between(one.inputs, one.node) if isinstance(one, Match) else one.node in around
            for one in found
        ):
            found = [*found, doubt]
            yield doubt
    counts = {number_of_scores(node) for node in view.graph.nodes} - {None}
    products = {node: stacks for node in view.graph.nodes if (stacks := _stacks(node, view.weights, counts))}
    if not products:
        return
    said = set[Node]()
    for one in found:
        said.update(one.inputs if isinstance(one, Match) else _nearby(one.node, products))
    for node, stacks in products.items():
        if not stacks & said:
            said |= _nearby(node, products)
            yield MatchFailure(node, "unread", "weights of experts are multiplied here, in no form that is known")


def _stacks(node: Node, weights: frozenset[Node], counts: set[Any]) -> set[Node]:
    """The weights that `node` multiplies by, in all their views, if they are those of as many experts as there are
    scores to choose by."""
    if node.op != "call_function" or str(node.target).split(".")[-2:][0] not in _PRODUCTS:
        return set()
    found, given = set[Node](), 0
    for operand in node.all_input_nodes:
        each, chain = False, [operand]
        while operand.op == "call_function" and (
            is_cast(operand) or operand.target in _TAKEN or operand.target is operator.getitem
        ):
            each = each or _of(operand, counts)
            operand = operand.args[0]  # type: ignore[assignment]
            chain.append(operand)
        if operand in weights:
            given += 1
            found.update(chain if each or _of(operand, counts) else ())
    return found if given == 1 else set()  # of two, one is an activation: behind a graph break these are inputs, too


def _of(node: Node, counts: set[Any]) -> bool:
    fake = value(node)
    if not isinstance(fake, torch.Tensor) or fake.dim() < 3:
        return False
    return isinstance(fake.shape[0], int) and fake.shape[0] in counts


def _nearby(node: Node, products: dict[Node, set[Node]]) -> set[Node]:
    """The weights that are multiplied by shortly before or behind `node`."""
    return {weight for n in _around(node) for weight in products.get(n, ())}


def _around(node: Node) -> set[Node]:
    """What `node` was computed from a few steps ago, and what is computed from it in the next few."""
    found = set[Node]()
    for back in (True, False):
        order = [node]
        for n in order:
            for other in n.all_input_nodes if back else n.users:
                if other not in order and other.op == "call_function" and len(order) < _NEAR:
                    order.append(other)
        found.update(order)
    return found
