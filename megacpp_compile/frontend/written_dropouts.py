"""Dropouts whose result is written to, `x = dropout(x); x += residual`, which torch's export does not trace.

A dropout that drops nothing returns its input and one that drops a new tensor, so that export, which leaves open which
of the two it is, lets nobody write to either. Here it is known: the input itself stands for the one, as in eager, where
a write is a write to the input too; the other's copy may be written to.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile.frontend.hidden_writes import memory_of, written_tensors
from megacpp_compile.fx.edit import called, dynamo_value


def without_writes_to_dropouts(gm: GraphModule) -> GraphModule:
    """`gm` with no write to what a dropout returns; itself where there is none."""
    dropouts = [n for n in gm.graph.nodes if _is_dropout(n) and not _hidden(n)]
    to = {memory_of(w) for n in gm.graph.nodes for w in written_tensors(n)} if dropouts else set()
    for node in reversed(dropouts):  # one may be the input of the next
        if not _drops(node) and memory_of(node) in to:
            to.add(memory_of(node.all_input_nodes[0]))
    found = [n for n in dropouts if memory_of(n) in to or not _drops(n) and memory_of(n.all_input_nodes[0]) in to]
    if not found:
        return gm
    graph, env = fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, env))
    for node in (env[n] for n in found):
        if not _drops(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
            continue
        with graph.inserting_after(node):
            copy = graph.call_method("clone", (node,))
        node.replace_all_uses_with(copy, delete_user_cb=functools.partial(operator.is_not, copy))
        copy.meta.update(node.meta)
    new = GraphModule(gm, graph)
    new.meta.update(gm.meta)
    return new


def _is_dropout(node: Node) -> bool:
    """Whether `node` calls a dropout that is not to work in place: such a one writes, and is traced."""
    named = node.op == "call_function" and called(node).partition(".")[0] == "dropout"
    return named and not _argument(node, 3, "inplace")


def _drops(node: Node) -> bool:
    """Whether a dropout may drop anything: a probability that is an input is not known."""
    trains = _argument(node, 2, "training", _argument(node, 2, "train", True))
    return trains is not False and _argument(node, 1, "p", 0.5) != 0


def _argument(node: Node, at: int, name: str, default: Any = False) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def _hidden(node: Node) -> bool:
    """Whether a dropout is made where autograd does not see it, of a tensor that has a gradient: its result would hide
    writes. Of a tensor without memory of its own nothing is known."""
    of = node.all_input_nodes[0]
    if None in (memory_of(node), memory_of(of)):
        return True
    return dynamo_value(of).requires_grad and not dynamo_value(node).requires_grad
