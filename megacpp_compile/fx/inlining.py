"""Puts the graphs that calls of a higher-order op hold in the place of the calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile.fx.copies import in_place_of
from megacpp_compile.fx.edit import all_nodes, attribute_of

# (a call, the graph it holds) -> takes each node of that graph and its copy.
Entering = Callable[[Node, GraphModule], Callable[[Node, Node], object]]


def inlined(gm: GraphModule, op: Any, operands: int, entering: Entering) -> GraphModule:
    """Dynamo's graph `gm` itself where nothing calls `op`, else a copy without calls of it, also in graphs it holds.

    A call's first argument is the graph; operands: the place of the first one that the graph is called with.
    """
    if not any(node.target is op for node in all_nodes(gm)):
        return gm
    out = in_place_of(gm, gm.graph, {})  # shares the modules; its own attribute table
    graph, env = fx.Graph(), dict[Node, Any]()
    names = (f"inlined_{i}" for i in itertools.count())

    def put(owner: GraphModule, values: Iterator[Any], note: Callable[[Node, Node], object]) -> Any:
        for node in owner.graph.nodes:
            if node.op == "placeholder" and owner is not gm:
                env[node] = next(values)
            elif node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            elif node.target is op:
                body = attribute_of(owner, node.args[0].target)
                results = put(body, iter(fx.map_arg(node.args[operands:], env.__getitem__)), entering(node, body))
                env[node] = tuple(results) if isinstance(results, (tuple, list)) else results
            elif (parts := _parts(node, env)) is not None:
                env[node] = parts[node.args[1]]
            elif node.op == "get_attr" and all(user.target is op for user in node.users):
                pass  # a body
            else:
                new = env[node] = graph.node_copy(node, env.__getitem__)
                if node.op == "get_attr":
                    held = attribute_of(owner, node.target)
                    held = inlined(held, op, operands, entering) if isinstance(held, GraphModule) else held
                    new.target = node.target if owner is gm else next(names)
                    setattr(out, new.target, held)
                note(node, new)

    graph.output(put(gm, iter(()), lambda *_: None)).meta.update(gm.graph.output_node().meta)
    return in_place_of(out, graph, {n: env[n] for n in gm.graph.find_nodes(op="placeholder")})


def _parts(node: Node, env: dict[Node, Any]) -> tuple[Any, ...] | None:
    """What the call of `op` returns that `node` takes a part of."""
    source = env.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    return source if isinstance(source, tuple) and node.op == "call_function" else None
