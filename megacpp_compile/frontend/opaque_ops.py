"""Higher-order ops (custom autograd functions, flex attention, scans) carried around capture untouched.

Pre-dispatch tracing would run through them: a custom `autograd.Function` would lose its own backward. So the graph is
split at each: its outputs become inputs of the traced part, its arguments outputs; `restore` puts the call back. Each
argument leaves the traced part as a clone, which protects its value from later in-place ops and marks where the call
stands, with its grad and autocast modes. `restore` removes the clones.

Calls on DTensors (`frontend.dtensors`) are carried around in the same way. What they hand each other never enters the
traced part, nor do inputs and outputs of the frame that are DTensors; only local tensors cross.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile._torch.dispatch import is_traceable_wrapper_subclass
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile._torch.ops import HigherOrderOperator
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend import dtensors
from megacpp_compile.fx.edit import all_nodes, attribute_of, dynamo_value
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.report.records import MissedFusion

_CLONE = torch.ops.aten.clone.default
_EMPTY = torch.ops.aten.empty.memory_format
REPORTED_AS = "capture"
WHAT = "megacpp_opaque"  # in a call's metadata: what the report calls it
# Products as PyTorch has them; what else multiplies is made of them.
_PRODUCTS = frozenset(
    "linear matmul mm bmm addmm baddbmm einsum conv1d scaled_dot_product_attention grouped_mm scaled_mm".split()
)


@dataclasses.dataclass
class OpaqueCall:
    """A call that was isolated: where its results enter the traced part and its tensor arguments leave it."""

    node: Node
    owner: GraphModule
    results: list[tuple[int | None, Node]]  # (output index, placeholder standing for it); None: the result itself
    arguments: dict[Node, Node]  # original argument nodes without submodules, and what leaves the traced part for them
    joined: bool = False  # whether it stands where the call before it does


@dataclasses.dataclass
class IsolatedHops:
    """The traced part. fakes: its inputs, those of the frame first, then what stands for results of `calls`.

    inputs, outputs: how many are the frame's own; the calls' results and arguments follow. holders: the frame's
    placeholders. on_dtensors: those of them that are left out, and calls. left_out: position of an output of the frame
    that is -> the node.
    """

    gm: GraphModule
    fakes: list[Any]
    calls: list[OpaqueCall]
    inputs: int
    outputs: int
    holders: Sequence[Node] = ()
    on_dtensors: Collection[Node] = ()
    left_out: dict[int, Node] = dataclasses.field(default_factory=dict)


def isolate_hops(
    gm: GraphModule, fakes: Sequence[Any], mode: FakeTensorMode, on_dtensors: Collection[Node] = ()
) -> IsolatedHops:
    """`gm` without its higher-order calls, nor `on_dtensors`, placeholders and calls as `frontend.dtensors` names them.
    Raises CaptureError for one that writes to its arguments or whose results have no known shape."""
    output = next(iter(reversed(gm.graph.nodes)))
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    if not on_dtensors and not any(_is_call(n) for n in gm.graph.nodes):
        return IsolatedHops(gm, list(fakes), [], len(fakes), len(values))
    graph, env = fx.Graph(), dict[Node, Node]()
    extra: list[Any] = []
    calls: list[OpaqueCall] = []
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    own = [fake for node, fake in zip(holders, fakes, strict=True) if node not in on_dtensors]
    for node in holders:
        if node not in on_dtensors:
            env[node] = graph.node_copy(node)
    replaced: set[Node] = set()
    joined = False
    for node in gm.graph.nodes:
        if node in env or node in replaced or node.op in ("placeholder", "output"):
            continue
        if not (on_dtensor := node in on_dtensors) and not _is_call(node):
            if node.op == "get_attr" and isinstance(attribute_of(gm, node.target), GraphModule):
                continue  # a body; the call brings it along
            env[node] = graph.node_copy(node, env.__getitem__)
            joined = joined and node.op == "get_attr"
            continue
        arguments = {n: _snapshot(graph, n, env[n]) for n in node.all_input_nodes if n in env and not is_body(gm, n)}
        call = OpaqueCall(node, gm, [], arguments)
        if on_dtensor and not any(v.target is _CLONE for v in arguments.values()):
            if not (call := dataclasses.replace(call, joined=joined)).joined:
                marker = graph.call_function(_EMPTY, ([0],), {"device": torch.device("cpu")})
                call.arguments[marker] = graph.call_function(_CLONE, (marker,))
        for index, result in _results(node) if not on_dtensor else [(None, node)] if dtensors.crosses(node) else ():
            fake = dynamo_value(result)
            CaptureError.when(
                not isinstance(fake, torch.Tensor | torch.SymInt),
                f"{node.target} returns something that is neither a tensor nor a size",
            )
            holder = _placeholder(graph, f"opaque_{node.name}_{index or 0}")
            holder.meta["example_value"] = fake
            env[result] = holder
            replaced.add(result)
            extra.append(refake(fake, mode) if isinstance(fake, torch.Tensor) else fake)
            call.results.append((index, holder))
        calls.append(call)
        joined = True
    left_out = {i: v for i, v in enumerate(values) if v in on_dtensors and v not in env}
    outs = [fx.map_arg(v, env.__getitem__) for i, v in enumerate(values) if i not in left_out]
    outputs = len(outs)
    outs += [a for c in calls for a in c.arguments.values()]
    graph.output(tuple(outs))
    part = GraphModule(gm, graph)
    part.meta.update(gm.meta)
    return IsolatedHops(part, [*own, *extra], calls, len(own), outputs, holders, on_dtensors, left_out)


def given_up(made: IsolatedHops) -> list[MissedFusion]:
    """A row for each call that multiplies inside: every idiom does, and none is looked for in there."""
    rows = {}
    for call in made.calls:
        source = source_line(call.node)
        if call.node in made.on_dtensors:
            if _is_product(call.node):
                what = dtensors.described(call.node)
                reason = f"{what} is compiled as without this package: its collectives are DTensor's"
                rows[source or call.node.name] = MissedFusion(
                    REPORTED_AS, module_fqn(call.node), source, call.node.name, "opaque", reason
                )
            continue
        bodies = [attribute_of(call.owner, n.target) for n in call.node.all_input_nodes if is_body(call.owner, n)]
        if call.node.op == "call_module":
            bodies = [attribute_of(call.owner, call.node.target)]
        if _own_backward(call.node) or not any(_multiplies(body) for body in bodies):
            continue
        what = call.node.meta.get(WHAT, f"`{call.node.target}`")
        reason = f"no idiom is looked for inside {what}: it is compiled as without this package"
        rows[source or call.node.name] = MissedFusion(
            REPORTED_AS, module_fqn(call.node), source, call.node.name, "opaque", reason
        )
    return list(rows.values())


def _own_backward(node: Node) -> bool:
    """A custom `autograd.Function`, whose author has written what no idiom may replace."""
    return "autograd_function" in str(node.target)


def _multiplies(body: torch.nn.Module) -> bool:
    return any(map(_is_product, all_nodes(body)))


def _is_product(node: Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return name.strip("_").partition(".")[0] in _PRODUCTS


def _snapshot(graph: fx.Graph, original: Node, node: Node) -> Node:
    """A clone of a tensor as it is at the call; a number as it is."""
    known = dynamo_value(original)
    number = known is not None and not isinstance(known, torch.Tensor)
    return node if number else graph.call_function(_CLONE, (node,))


def refake(fake: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of Dynamo's own mode, or what holds some, as one of the backend's; both share their symbolic
    sizes."""
    if not is_traceable_wrapper_subclass(fake):
        return plain(fake, mode)
    with mode, torch.no_grad():
        names, described = fake.__tensor_flatten__()
        parts = {name: getattr(fake, name) for name in names}  # a mesh may be among them
        held = {name: refake(p, mode) if isinstance(p, torch.Tensor) else p for name, p in parts.items()}
        copy = type(fake).__tensor_unflatten__(held, described, fake.size(), fake.stride()).detach()
    return copy.requires_grad_(fake.requires_grad)


def plain(fake: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of `mode`, of no class of its own, as large as `fake`."""
    with mode, torch.no_grad():
        copy = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)
    return copy.requires_grad_(fake.requires_grad)


def _placeholder(graph: fx.Graph, name: str) -> Node:
    """A placeholder behind those the graph has."""
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    if first is None:
        return graph.placeholder(name)
    with graph.inserting_before(first):
        return graph.placeholder(name)


def restore(gm: GraphModule, made: IsolatedHops) -> None:
    """Put the calls back into the traced graph, in place, and drop the inputs and outputs that stood for them."""
    graph = gm.graph
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(iter(reversed(graph.nodes)))
    values = list(output.args[0])
    frame, arguments = values[: made.outputs], iter(values[made.outputs :])
    standins = iter(holders[made.inputs :])
    borders = [(c, {a: next(arguments) for a in c.arguments}, [(i, next(standins)) for i, _ in c.results])
               for c in made.calls]  # fmt: skip
    placed = _restore_holders(graph, made, holders)
    snapshots: list[Node] = []
    markers: list[Any] = []  # what holds the place of calls that take no local tensor
    before: Node | None = None
    for call, leaving, results in borders:
        clones = [v for a, v in leaving.items() if call.arguments[a].target is _CLONE]
        CaptureError.when(
            not (clones or call.joined) or any(getattr(v, "target", None) is not _CLONE for v in clones),
            f"tracing lost the place of {call.node.target}",
        )
        snapshots += clones
        markers += [v.args[0] for a, v in leaving.items() if a.target is _EMPTY and a.graph is made.gm.graph]
        before = max(clones) if clones else before
        assert before is not None
        traced = {a: v.args[0] if v in clones else v for a, v in leaving.items()}
        CaptureError.when(
            any(isinstance(v, Node) and not v < before for v in traced.values()),
            "a call's arguments are ready only after it",
        )
        with graph.inserting_before(before):

            def place(a: Node, traced: dict[Node, Any] = traced, call: OpaqueCall = call) -> Any:
                if a in traced or a in placed:
                    return traced[a] if a in traced else placed[a]
                name = f"{call.node.name}_{a.target}".replace(".", "_")
                gm.add_submodule(name, attribute_of(call.owner, a.target))
                return graph.get_attr(name)

            new = graph.node_copy(call.node, place)
            if new.op == "call_module":
                gm.add_submodule(str(new.target), attribute_of(call.owner, new.target))
            new.meta["val"] = call.node.meta.get("example_value")
            placed[call.node] = new
            for index, holder in results:
                if index is None:
                    value = new
                else:
                    value = graph.call_function(operator.getitem, (new, index))
                value.meta["val"] = holder.meta.get("val")
                holder.replace_all_uses_with(value)
                frame = [value if v is holder else v for v in frame]
    for position, node in sorted(made.left_out.items()):
        frame.insert(position, placed[node])
    output.args = (tuple(frame),)
    for node in [*snapshots, *markers, *holders[made.inputs :]]:
        graph.erase_node(node)


def _restore_holders(graph: fx.Graph, made: IsolatedHops, holders: Sequence[Node]) -> dict[Node, Node]:
    """Put the frame's placeholders that were left out between `holders`; each by the node it was."""
    placed = dict[Node, Node]()
    own, last = iter(holders), None
    for node in made.holders:
        if node not in made.on_dtensors:
            last = next(own)
            continue
        with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
            placed[node] = last = graph.node_copy(node)
        last.meta["val"] = node.meta.get("example_value")
    return placed


def _is_call(node: Node) -> bool:
    if node.op == "call_module":
        return True
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return False
    CaptureError.when("mutation" in str(node.target) or not node.users, f"{node.target} writes to its arguments")
    return True


def is_body(gm: GraphModule, node: Node) -> bool:
    """Whether the node reads a submodule, such as the graph that a higher-order op calls."""
    return node.op == "get_attr" and isinstance(attribute_of(gm, str(node.target)), torch.nn.Module)


def _results(node: Node) -> list[tuple[int | None, Node]]:
    if isinstance(node.meta.get("example_value"), torch.Tensor):
        return [(None, node)]
    found: list[tuple[int | None, Node]] = []
    for user in node.users:
        CaptureError.when(
            user.target is not operator.getitem or not isinstance(user.args[1], int),
            f"{node.target} returns something that is not a tuple of tensors",
        )
        found.append((user.args[1], user))
    return found
