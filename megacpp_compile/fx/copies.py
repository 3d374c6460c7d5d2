"""Copies of a graph that are to be changed: nobody changes the graph that Dynamo handed over."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping

from torch.fx import Graph, GraphModule, Node

from megacpp_compile._torch.modules import lazy_graph_module


def copied(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy of `graph`, its output included, and the nodes of `graph` -> theirs in the copy."""
    copy, copies = Graph(), dict[Node, Node]()
    copy.output(copy.graph_copy(graph, copies)).meta.update(graph.output_node().meta)
    return copy, copies


def module_like(gm: GraphModule, graph: Graph) -> GraphModule:
    """A module of `graph` with the attributes and `meta` of `gm`. Where modules are lazy, as inside Inductor, its code
    is written when it is called, if ever."""
    new = lazy_graph_module(gm, graph)
    new.meta.update(gm.meta)
    return new


def in_place_of(gm: GraphModule, graph: Graph, copies: Mapping[Node, Node]) -> GraphModule:
    """A module of `graph` that is to Dynamo and to `fx.provenance` what its own graph `gm` is. copies: the nodes of
    `gm` -> theirs in `graph`."""
    new = GraphModule(gm, graph)
    new.meta.update(gm.meta)
    for old, copy in copies.items():
        if hasattr(old, "_dynamo_source"):
            copy._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    for name in ("compile_subgraph_reason", "_backend_id"):
        if hasattr(gm, name):
            setattr(new, name, getattr(gm, name))
    return new


def changed(gm: GraphModule, found: Collection[Node], change: Callable[[Node], object]) -> GraphModule:
    """Dynamo's graph `gm` itself where nothing is `found` in it, else a copy: `change` is called with the copy of each
    node found, and may erase it."""
    if not found:
        return gm
    graph, copies = copied(gm.graph)
    for node in found:
        change(copies[node])
    return in_place_of(gm, graph, {old: new for old, new in copies.items() if not new._erased})


def clone_for_users(node: Node) -> None:
    """Have what reads `node` in Dynamo's graph read a clone of it, made behind it."""
    with node.graph.inserting_after(node):
        clone = node.graph.call_method("clone", (node,))
    node.replace_all_uses_with(clone, delete_user_cb=functools.partial(operator.is_not, clone))
    clone.meta.update(node.meta)
