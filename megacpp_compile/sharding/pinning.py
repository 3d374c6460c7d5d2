"""Pins tensors to the specs of a `ShardingPlan`, by `torch_xla.distributed.spmd.mark_sharding`.

Whatever replaces a part of the model (a fused op in a frame, a module of `NativeLayerSpec`) pins its parameters when it
is made, so that XLA's sharding propagation does not decide about them. torch_xla is imported when something is pinned.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from megacpp_compile.config.sharding import ShardingPlan, Spec, text
from megacpp_compile.errors import ShardingError
from megacpp_compile.fx.held import held
from megacpp_compile.fx.module_names import named_parameters
from megacpp_compile.fx.provenance import input_name
from megacpp_compile.report.records import Pinned

# Parameter -> (name in the model, parameter) of it and of those in its place in blocks that share its artifact.
SiblingParams = Callable[[torch.Tensor], Sequence[tuple[str, torch.Tensor]]]


def apply(plan: ShardingPlan, model: nn.Module) -> tuple[Pinned, ...]:
    """Pin every parameter of `model` that a rule of `plan` hits; returns what was pinned.

    Raises RuleWithoutHitError for a rule that hits none, before anything is pinned; ShardingError as `pin`.
    """
    parameters = dict(named_parameters(model))
    plan.check_hits(parameters)
    return _pin_named(plan, ((name, p, "") for name, p in parameters.items()))


def pin(plan: ShardingPlan, tensor: torch.Tensor, spec: Any, name: str = "") -> None:
    """Pin any tensor, a batch of inputs say, to `spec`; nothing happens where it is pinned to the same already.

    spec: an entry for each dimension of `tensor`, as in a rule, or None for a whole copy on every device. name: for
    messages. Raises BadOptionError for a spec that is none or names an axis that the mesh lacks; ShardingError for one
    that does not fit the tensor, a tensor on no XLA device, and a runtime that is not in SPMD mode or has another
    number of devices than the mesh.
    """
    spec = plan.checked("spec", spec)
    whole = plan.whole(name, tensor.shape, spec)
    if tensor.device.type != "xla":
        remedy = "Move it to torch_xla.device() first, or compile without 'sharding'."
        raise ShardingError(name, spec, f"it is on {tensor.device}, not on an XLA device", remedy)
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as runtime

    if not runtime.is_spmd():
        remedy = "Call torch_xla.runtime.use_spmd() before any tensor is on the device."
        raise ShardingError(name, spec, "the runtime is not in SPMD mode", remedy)
    there = runtime.global_runtime_device_count()
    if there != len(plan.devices):
        problem = f"the mesh has {len(plan.devices)} devices and the runtime {there}"
        raise ShardingError(name, spec, problem, "Give the mesh as many devices as there are.")
    spmd.mark_sharding(tensor, mesh(plan), whole)


@functools.lru_cache(maxsize=16)
def mesh(plan: ShardingPlan) -> Any:
    """The plan's mesh as an object of torch_xla's."""
    import numpy
    import torch_xla.distributed.spmd as spmd

    axes = dict(plan.mesh)
    return spmd.Mesh(numpy.array(plan.devices), tuple(axes.values()), tuple(axes))


def pin_frame(
    plan: ShardingPlan, gm: GraphModule, inputs: Sequence[Any], ops: Iterable[tuple[str, Node]], whole: bool,
    sibling_params: SiblingParams | None = None,
) -> tuple[tuple[Pinned, ...], dict[int, Spec]]:  # fmt: skip
    """Pin the parameters a frame takes: those of its fused ops, and those that a rule hits. Returns what was pinned,
    and position of a placeholder -> spec.

    gm, inputs: Dynamo's graph, whose placeholders have the names, and the values it is called with. ops: (pass, node)
    of each fused op, in a graph with placeholders of the same order. whole: whether the frame is all that is compiled,
    so that a rule without a hit is an error; otherwise the rule may be about another frame. sibling_params: see
    `SiblingParams`; None where the artifact serves this frame alone. Raises RuleWithoutHitError, and ShardingError as
    `pin`.
    """
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names = {
        i: input_name(node)
        for i, (node, value) in enumerate(zip(holders, inputs, strict=True))
        if isinstance(value, nn.Parameter)
    }
    if whole:
        plan.check_hits(names.values())
    readers = _readers(ops, set(names))
    found: dict[str, tuple[torch.Tensor, str]] = {}
    own = {}
    for i, name in names.items():
        by = ", ".join(dict.fromkeys(readers.get(i, ())))
        same = sibling_params(inputs[i]) if sibling_params is not None else [(name, inputs[i])]
        own[i] = next((fqn for fqn, parameter in same if parameter is inputs[i]), name)
        found |= {fqn: (parameter, by) for fqn, parameter in same}
    pinned = _pin_named(plan, ((fqn, p, by) for fqn, (p, by) in found.items()))
    return pinned, {i: plan.decide(own[i])[0] for i in names}


def _pin_named(plan: ShardingPlan, found: Iterable[tuple[str, torch.Tensor, str]]) -> tuple[Pinned, ...]:
    """Pin those of (name, parameter, fused ops that read it) that a rule hits or a fused op reads.

    All specs are checked before the first parameter is pinned.
    """
    wanted = [(name, p, by, *plan.decide(name)) for name, p, by in found]
    wanted = [row for row in wanted if row[2] or row[4]]
    for name, p, _, spec, _ in wanted:
        plan.whole(name, p.shape, spec)
    for name, p, _, spec, _ in wanted:
        pin(plan, p, spec, name)
    return tuple(Pinned(name, tuple(p.shape), text(spec), rule, by) for name, p, by, spec, rule in wanted)


def _readers(ops: Iterable[tuple[str, Node]], parameters: set[int]) -> dict[int, list[str]]:
    """Position of a parameter's placeholder -> the ops that read it, directly or through nodes that read parameters
    alone."""
    readers: dict[int, list[str]] = {}
    known: dict[Node, frozenset[int]] | None = None
    for name, op in ops:
        known = known if known is not None else _of_parameters(op.graph, parameters)
        for operand in op.all_input_nodes:
            for i in known.get(operand, ()):
                readers.setdefault(i, []).append(name)
    return readers


def _of_parameters(graph: torch.fx.Graph, parameters: set[int]) -> dict[Node, frozenset[int]]:
    """Nodes computed from parameters alone (a view, a cast) -> the positions of those parameters' placeholders."""
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    known = {node: frozenset({i}) for i, node in enumerate(holders) if i in parameters}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and all(a in known for a in node.all_input_nodes):
            known[node] = frozenset().union(*(known[a] for a in node.all_input_nodes))
    return known


# --- modules that pin what they construct

_constructing: contextvars.ContextVar[tuple[ShardingPlan, str] | None] = contextvars.ContextVar("plan", default=None)


@contextmanager
def constructing(plan: ShardingPlan, fqn: str) -> Iterator[None]:
    """Inside, modules of `NativeLayerSpec` are constructed under the name `fqn` and pin each parameter as they make it,
    one that no rule hits to a whole copy on every device.

    Nested, an inner name is relative to the outer one. Raises ShardingError as `pin`.
    """
    outer = _constructing.get()
    with held(_constructing, (plan, f"{outer[1]}.{fqn}" if outer is not None else fqn)):
        yield


def constructed(name: str, parameter: nn.Parameter) -> None:
    """Pin a parameter that a module has just made, inside `constructing`. name: the parameter's name in its module."""
    if (found := _constructing.get()) is not None:
        plan, module = found
        fqn = f"{module}.{name}"
        pin(plan, parameter, plan.decide(fqn)[0], fqn)
