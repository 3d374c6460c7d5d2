"""Attention under `torch.nn.attention.sdpa_kernel`, which allows some of torch's kernels and may order them.

Dynamo writes such a region as calls that set the process's choice. Pre-dispatch tracing makes them and leaves them out,
and it is AOTAutograd, later, that picks a kernel for each `aten.scaled_dot_product_attention`. So every call keeps the
choice it was traced under, and has the calls around it again in the graph that the backend is given.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacpp_compile._torch.attention import backend_from_string, current_backends, set_backends

_KEY = "sdpa_kernel"  # of the metadata that tracing hands on
Choice = tuple[tuple[str, ...], bool]  # names of kernels, and whether they are in the order of preference


def mark(graph: fx.Graph) -> None:
    """Note on what stands in such regions of Dynamo's graph which kernels are allowed there; nothing else changes."""
    choice: Choice | None = None
    for node in graph.nodes:
        if node.op == "call_function" and node.target is set_backends:
            backends, ordered = (*node.args, False)[:2]
            choice = tuple(_name(b) for b in backends), bool(ordered)
            choice = None if choice == _outside(choice[1]) else choice  # the end of a region sets what was before it
        elif choice is not None:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: choice}


def choice_of(node: Node) -> Choice | None:
    """The kernels that `node` may take, where its frame says so."""
    found = (node.meta.get("custom") or {}).get(_KEY)
    return found and (tuple(found[0]), bool(found[1]))


def chosen(choice: Choice | None) -> AbstractContextManager[Any]:
    """The region of `choice`, or none."""
    if choice is None:
        return nullcontext()
    names, ordered = choice
    return sdpa_kernel([SDPBackend.__members__[name] for name in names], set_priority=ordered)


def restore_sdpa_regions(gm: GraphModule) -> None:
    """Have each attention of a captured graph, in place, choose among the kernels that its frame allows it."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    found = [(n, choice) for n in gm.graph.find_nodes(op="call_function", target=attention) if (choice := choice_of(n))]
    for node, choice in found:
        with gm.graph.inserting_before(node):
            _set(gm.graph, choice)
        with gm.graph.inserting_before(node.next):
            _set(gm.graph, _outside(choice[1]))
    if found:
        gm.recompile()


def _set(graph: fx.Graph, choice: Choice) -> None:
    names, ordered = choice
    graph.call_function(set_backends, ([graph.call_function(backend_from_string, (name,)) for name in names], ordered))


def _outside(ordered: bool) -> Choice:
    """The choice where the frame is compiled."""
    return tuple(b.name for b in current_backends(with_priority=ordered)), ordered


def _name(backend: Any) -> str:
    return backend.args[0] if isinstance(backend, Node) else backend.name  # type: ignore[return-value]
