"""`torch.func` transforms inside a frame: `vmap`, `grad`, `vjp`, `jvp`, and what is made of them (`associative_scan`).

Dynamo's graph enters and leaves a level of functorch by calls. Pre-dispatch tracing can't functionalise what runs on
the wrapped tensors in between. A vmap that no gradient flows into, as libraries build attention masks under, is traced
by itself with vmap's batching rules applied, which leaves plain ATen in its place; so is one whose ATen is arithmetic
alone, which autograd differentiates alike, as what an associative scan combines pairs with. Every other region becomes
one call of a submodule that holds its nodes as Dynamo wrote them: `opaque_ops` carries it around capture, and it is
differentiated as if this package were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.functorch import is_functorch_wrapped_tensor
from megacpp_compile._torch.modes import restored
from megacpp_compile._torch.ops import HigherOrderOperator, aten, set_grad_enabled
from megacpp_compile.errors import CaptureError
from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.frontend import autocast
from megacpp_compile.frontend.opaque_ops import WHAT, is_body, refake
from megacpp_compile.fx.differentiated import trains

# Ops that a vmap leaves as they are, each with the gradient that it has by itself.
_ARITHMETIC = {
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.exp.default, aten.mul.Scalar,
    aten.add.Scalar,
}  # fmt: skip
_TRAINED = "a `vmap` that gradients flow through"
_ENTER, _LEAVE = "_increment_nesting", "_decrement_nesting"
_VMAP = "_vmap" + _ENTER


@dataclasses.dataclass
class _Region:
    """A transform from its entry to its exit. inputs: nodes outside that it reads; outputs: its nodes read outside."""

    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]


class _NotPlain(GivenUp):
    """A transform that does not become plain ATen, in the words of the report."""


def resolve_transforms(gm: GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    """`gm` itself where it holds no transform, else a copy in which each is plain ATen or the call of a submodule.

    fakes: the graph's inputs as fake tensors. Raises CaptureError for a region that can be neither.
    """
    regions = [_region(nodes) for nodes in _runs(list(gm.graph.nodes))]
    if not regions:
        return gm
    first = {region.nodes[0]: region for region in regions}
    inside = {n for region in regions for n in region.nodes}
    env: dict[Node, Any] = {}
    graph, out = fx.Graph(), GraphModule(gm, gm.graph)  # shares the submodules; its own attribute table
    out.meta.update(gm.meta)
    values = _values(gm, fakes)
    grad = torch.is_grad_enabled()
    opened: list[Node] = []  # autocast regions around the node at hand: a vmap's casts are those of its place
    for node in gm.graph.nodes:
        if node.target is autocast.ENTER:
            opened.append(node)
        elif node.target is autocast.LEAVE and node.args[0] in opened:
            opened.remove(node.args[0])
        elif node.target is set_grad_enabled:
            grad = node.args[0]
        if node in first:
            try:
                with contextlib.ExitStack() as stack:
                    for entry in opened:
                        stack.enter_context(torch.autocast(*entry.args))
                    _resolve(gm, first[node], graph, env, values, mode)
            except _NotPlain as why:
                _enclose(gm, first[node], graph, env, out, values, mode, bool(grad), str(why))
        elif node in inside:
            continue
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], env.__getitem__))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            if hasattr(node, "_dynamo_source"):
                env[node]._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    out.graph = graph
    out.recompile()
    return out


def _runs(nodes: Sequence[Node]) -> list[list[Node]]:
    """Runs of nodes from an outermost transform's entry to its exit, or, as that of `vjp` whose pullback is called
    later, to the last reader of a value that is no plain tensor."""
    found: list[list[Node]] = []
    place = {node: i for i, node in enumerate(nodes)}
    depth, end = 0, -1
    for i, node in enumerate(nodes):
        name = _name(node)
        if name.endswith(_ENTER):
            if depth == 0 and i > end:
                found.append([])
            depth += 1
        if depth or i <= end:
            found[-1].append(node)
            if not _plain(node):
                end = max(end, *(place[user] for user in node.users), i)
        if name.endswith(_LEAVE):
            depth -= 1
    return found


def _plain(node: Node) -> bool:
    """Whether the node's value may be read outside of the transform: a tensor that is not wrapped."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not is_functorch_wrapped_tensor(value)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _region(nodes: list[Node]) -> _Region:
    members = set(nodes)
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in members))
    return _Region(nodes, inputs, [n for n in nodes if any(u not in members for u in n.users)])


def _values(gm: GraphModule, fakes: Sequence[Any]) -> dict[Node, Any]:
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return dict(zip(holders, fakes, strict=True))


def _fakes(region: _Region, values: dict[Node, Any], mode: FakeTensorMode) -> dict[Node, Any]:
    """What the region reads, as values of `mode`; None for what is unknown, such as the body of a higher-order op."""
    found = {}
    for node in region.inputs:
        fake = values[node] if node in values else node.meta.get("example_value")
        found[node] = refake(fake, mode) if isinstance(fake, torch.Tensor) and node not in values else fake
    return found


def _resolve(
    gm: GraphModule, region: _Region, graph: fx.Graph, env: dict[Node, Any], values: dict[Node, Any],
    mode: FakeTensorMode,
) -> None:  # fmt: skip
    """Put a vmap into `graph` as plain ATen. Raises _NotPlain, with `graph` as it was, where that can't be done."""
    _NotPlain.when(
        any(_name(n).endswith(_ENTER) and _name(n) != _VMAP for n in region.nodes), "a `torch.func` transform"
    )
    _NotPlain.when(any(n.target is autocast.ENTER for n in region.nodes), "a `vmap` that switches autocast")
    fakes = _fakes(region, values, mode)
    _NotPlain.when(any(f is None for f in fakes.values()), "a `vmap` that reads a value of unknown shape")
    trained = trains(fakes.values())
    _NotPlain.when(
        trained and any(n.op != "call_function" or _has_rules_of_its_own(n.target) for n in region.nodes), _TRAINED
    )
    try:
        with restored(), mode, torch.no_grad():
            traced = make_fx(_body(gm, region, region.inputs), tracing_mode="real")(*fakes.values())
    except Exception as error:
        raise _NotPlain("a `vmap` that cannot be traced by itself") from error
    _NotPlain.when(
        trained and any(n.op == "call_function" and n.target not in _ARITHMETIC for n in traced.graph.nodes), _TRAINED
    )
    _NotPlain.when(any(n.op == "get_attr" for n in traced.graph.nodes), "a `vmap` that makes a constant tensor")
    holders = iter(region.inputs)
    inner: dict[Node, Any] = {}
    for n in traced.graph.nodes:
        if n.op == "placeholder":
            inner[n] = env[next(holders)]
        elif n.op == "output":
            env.update(zip(region.outputs, fx.map_arg(n.args[0], inner.__getitem__), strict=True))
        else:
            inner[n] = graph.node_copy(n, inner.__getitem__)
            for field in ("stack_trace", "nn_module_stack"):
                if field in region.nodes[-1].meta:
                    inner[n].meta[field] = region.nodes[-1].meta[field]


def _has_rules_of_its_own(target: Any) -> bool:
    """Whether gradients may be other than those of the ATen that `target` runs."""
    return isinstance(target, HigherOrderOperator) or target is set_grad_enabled


def _body(gm: GraphModule, region: _Region, inputs: Sequence[Node]) -> GraphModule:
    """The region as a module of `inputs`; what else it reads are attributes."""
    sub = fx.Graph()
    local = {i: sub.placeholder(i.name) for i in inputs}
    for n in (*region.inputs, *region.nodes):
        if n not in local:
            local[n] = sub.node_copy(n, local.__getitem__)
    sub.output(tuple(local[o] for o in region.outputs))
    return GraphModule(gm, sub)


def _enclose(
    gm: GraphModule, region: _Region, graph: fx.Graph, env: dict[Node, Any], out: GraphModule,
    values: dict[Node, Any], mode: FakeTensorMode, grad: bool, what: str,
) -> None:  # fmt: skip
    """Put the call of a submodule of `out` that holds the region into `graph`. grad: the grad mode there. what: the
    region in the words of the report."""
    if not region.outputs:
        return  # nobody reads what it computes
    inputs = [i for i in region.inputs if not is_body(gm, i)]
    body = _body(gm, region, inputs)
    CaptureError.when(
        len({n.meta.get("ac_graph_id") for n in region.nodes if n.op == "call_function"}) > 1,
        "a checkpoint region inside a torch.func transform",
    )
    fakes = _fakes(region, values, mode)
    _check(body, [fakes[i] for i in inputs], mode, grad)
    out.add_submodule(name := f"transform_{region.nodes[0].name}", body)
    call = graph.call_module(name, tuple(env[i] for i in inputs))
    call.meta.update({k: v for k, v in region.nodes[0].meta.items() if k not in ("example_value", "val")})
    call.meta[WHAT] = what
    call.meta["example_value"] = tuple(o.meta.get("example_value") for o in region.outputs)
    for index, old in enumerate(region.outputs):
        env[old] = graph.call_function(operator.getitem, (call, index))
        env[old].meta.update(old.meta)


def _check(body: GraphModule, fakes: Sequence[Any], mode: FakeTensorMode, grad: bool) -> None:
    """Raise CaptureError where the body writes to what it reads, returns a view of it or leaves the grad mode switched:
    around the call none of that would be seen. grad: the grad mode at the call."""
    with mode, restored(), torch.set_grad_enabled(grad):
        given = [f.clone() if isinstance(f, torch.Tensor) else f for f in fakes]
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        versions = [t._version for t in tensors]
        results = [r for r in body(*given) if isinstance(r, torch.Tensor)]
        switched = torch.is_grad_enabled() is not grad
    CaptureError.when(
        any(t._version != v for t, v in zip(tensors, versions, strict=True)),
        "a torch.func transform writes to what it reads",
    )
    CaptureError.when(
        switched or any(is_functorch_wrapped_tensor(r) for r in results), "a torch.func transform is left in parts"
    )
    memory = [t.untyped_storage()._cdata for t in (*tensors, *results)]
    CaptureError.when(len(set(memory)) < len(memory), "a torch.func transform returns a view of what it reads")
