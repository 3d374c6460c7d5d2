"""`torch.vmap` inside a frame, resolved before capture.

Libraries build attention masks under nested vmaps (transformers 4.5x). Pre-dispatch tracing can't functionalise ops on
batched tensors, so each such region is traced by itself with vmap's batching rules applied, which leaves plain ATen,
and put back in its place. Regions that gradients flow into are left alone; the frame then falls back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend import autocast
from megacpp_compile.frontend.opaque_ops import refake

_ENTER, _LEAVE = "_vmap_increment_nesting", "_vmap_decrement_nesting"


def resolve_vmaps(gm: GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    """`gm` itself where it holds no vmap, else a copy with every vmap region as plain ATen.

    fakes: the graph's inputs as fake tensors. Raises CaptureError for a region that can't be resolved.
    """
    regions = _vmap_bodies(gm.graph)
    if not regions:
        return gm
    first = {nodes[0]: nodes for nodes in regions}
    inside = {n for nodes in regions for n in nodes}
    env: dict[Node, Any] = {}
    graph = fx.Graph()
    values = _values(gm, fakes)
    opened: list[Node] = []  # autocast regions around the node at hand: a vmap's casts are those of its place
    for node in gm.graph.nodes:
        if node.target is autocast.ENTER:
            opened.append(node)
        elif node.target is autocast.LEAVE and node.args[0] in opened:
            opened.remove(node.args[0])
        if node in first:
            with contextlib.ExitStack() as stack:
                for entry in opened:
                    stack.enter_context(torch.autocast(*entry.args))
                _resolve(gm, first[node], graph, env, values, mode)
        elif node in inside:
            continue
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], env.__getitem__))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            if hasattr(node, "_dynamo_source"):
                env[node]._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    out = GraphModule(gm, graph)
    out.meta.update(gm.meta)
    return out


def _vmap_bodies(graph: fx.Graph) -> list[list[Node]]:
    """Runs of nodes from an outermost vmap's entry to its exit."""
    found: list[list[Node]] = []
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == _ENTER:
            if depth == 0:
                found.append([])
            depth += 1
        if depth:
            found[-1].append(node)
        if name == _LEAVE:
            depth -= 1
    return found


def _values(gm: GraphModule, fakes: Sequence[Any]) -> dict[Node, Any]:
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return dict(zip(holders, fakes, strict=True))


def _resolve(
    gm: GraphModule,
    nodes: list[Node],
    graph: fx.Graph,
    env: dict[Node, Any],
    values: dict[Node, Any],
    mode: FakeTensorMode,
) -> None:
    if any(n.target is autocast.ENTER for n in nodes):
        raise CaptureError("autocast is switched inside a vmap")
    members = set(nodes)
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in members))
    outputs = [n for n in nodes if any(u not in members for u in n.users)]
    fakes = [values[i] if i in values else i.meta.get("example_value") for i in inputs]
    if any(f is None for f in fakes):
        raise CaptureError("a vmap region reads a value of unknown shape")
    fakes = [refake(f, mode) if isinstance(f, torch.Tensor) and i not in values else f
             for i, f in zip(inputs, fakes, strict=True)]  # fmt: skip
    if any(isinstance(f, torch.Tensor) and f.requires_grad for f in fakes) and torch.is_grad_enabled():
        raise CaptureError("gradients flow through a vmap")
    sub = fx.Graph()
    local: dict[Node, Node] = {i: sub.placeholder(i.name) for i in inputs}
    for n in nodes:
        local[n] = sub.node_copy(n, local.__getitem__)
    sub.output(tuple(local[o] for o in outputs))
    with torch.no_grad():
        traced = make_fx(GraphModule(gm, sub), tracing_mode="real")(*fakes)
    holders = iter(inputs)
    inner: dict[Node, Any] = {}
    for n in traced.graph.nodes:
        if n.op == "placeholder":
            inner[n] = env[next(holders)]
        elif n.op == "get_attr":
            raise CaptureError("a vmap region makes a constant tensor")
        elif n.op == "output":
            env.update(zip(outputs, fx.map_arg(n.args[0], inner.__getitem__), strict=True))
        else:
            inner[n] = graph.node_copy(n, inner.__getitem__)
            for field in ("stack_trace", "nn_module_stack"):
                if field in nodes[-1].meta:
                    inner[n].meta[field] = nodes[-1].meta[field]
