"""Rows that are picked, or repeated, and then detached are those of a tensor that is detached first: nothing flows back
through either. Experts then read one tensor, whatever each detaches.

Before: `x[rows].detach()`, `x.detach()[others]`          After: `d = x.detach(); d[rows]`, `d[others]`
"""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import of_tensors, replace, same_size, value
from megacpp_compile.fx.views import (
    DETACH,
    EXPANSIONS,
    FOLDS,
    IDENTITIES,
    PERMUTATIONS,
    REPETITIONS,
    RESHAPES,
    UNIT_DIMS,
)
from megacpp_compile.reader.links import chain

_PICKS = {aten.index.Tensor, aten.index_select.default} | EXPANSIONS | REPETITIONS
_SEEN = RESHAPES | FOLDS | UNIT_DIMS | PERMUTATIONS | IDENTITIES
_TEMPLATES = {aten.empty_like.default, aten.zeros_like.default}  # they take the shape and no value


def detached_rows(graph: fx.Graph) -> None:
    """Rewrite in place. What others read with its gradient is not computed twice."""
    while moved := [node for node in _merged(graph) if _moves(node)]:
        for node in moved:
            _move(graph, node)


def _merged(graph: fx.Graph) -> list[Node]:
    """What is detached, once each: all have the same memory."""
    first: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=DETACH):
        one = first.setdefault(node.args[0], node)  # type: ignore[arg-type]
        if one is not node:
            replace(node, one)
    return list(first.values())


def _moves(detached: Node) -> bool:
    """Whether what is detached is made of rows, of a tensor or of gates, that can be detached before."""
    made = detached.args[0]
    assert isinstance(made, Node)
    return _of_rows(made, detached) or made.target in _SEEN and any(_picks(u, detached) for u in detached.users)


def _picks(user: Node, detached: Node) -> bool:
    """Whether rows of `detached` are picked by `user`, or weighted by it as gates."""
    if _weighted(user):
        return same_size(value(detached).shape[-1], 1)
    return user.target in _PICKS and user.args[0] is detached


def _of_rows(node: Node, reader: Node) -> bool:
    """Whether `node` is picked or repeated rows of a tensor, perhaps seen otherwise, or weighted row by row, which
    nothing but `reader` reads."""
    *seen, node = chain(node, lambda n: n.target in _SEEN and len(n.users) == 1)
    reader = [reader, *seen][-1]
    if any(user is not reader and user.target not in _TEMPLATES for user in node.users):
        return False
    weighted = _weighted(node) and any(_of_rows(a, node) for a in node.args)  # type: ignore[arg-type]
    return node.target in _PICKS or weighted


def _weighted(node: Node) -> bool:
    """Whether `node` multiplies rows by a number for each."""
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return False
    return any(value(a).dim() > 1 and same_size(value(a).shape[-1], 1) for a in node.args)  # type: ignore[arg-type]


def _move(graph: fx.Graph, detached: Node) -> None:
    """Detach what `detached` is made of, instead."""
    made = detached.args[0]
    assert isinstance(made, Node)
    operands: list[Node] = list(made.args if _weighted(made) else made.args[:1])  # type: ignore[arg-type]
    with graph.inserting_before(made):
        before = {a: graph.node_copy(detached, lambda _, a=a: a) for a in operands}  # type: ignore[misc]
        again = graph.node_copy(made, lambda n: before.get(n, n))
    for operand, one in before.items():
        one.meta = {**detached.meta, "val": value(operand)}
    again.meta = dict(made.meta)
    detached.replace_all_uses_with(again)
    if all(user is detached or user.target in _TEMPLATES for user in made.users):
        made.replace_all_uses_with(again, lambda user: user is not detached)
    for node in (detached, made):
        if not node.users:
            graph.erase_node(node)
