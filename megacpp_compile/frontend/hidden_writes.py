"""Writes that autograd does not see: `weight.data.clamp_(-c, c)`, `x.detach().mul_(s)`, `x.mul_(s)` under `no_grad`.

Eager changes the values in place and differentiates what reads them as if nothing had been written. A functional graph
has a new value instead, `clamp(weight)`, through which the gradient would flow, or, under `no_grad`, end: such a frame
cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from megacpp_compile._torch.dispatch import is_traceable_wrapper_subclass
from megacpp_compile.errors import CaptureError
from megacpp_compile.fx.copies import changed
from megacpp_compile.fx.edit import called, dynamo_value, named_in_place
from megacpp_compile.fx.provenance import source_line
from megacpp_compile.reader.links import through

_DETACHES = ("detach", "detach_", "_get_data_attr")


def refuse_hidden_writes(gm: GraphModule) -> None:
    """Raises CaptureError for the first write in Dynamo's graph `gm`, or one that it calls, that autograd is not to see
    and that changes what something differentiable is."""
    for module in gm.modules():
        if isinstance(module, GraphModule) and (node := hidden_write(module)) is not None:
            raise CaptureError(
                "a tensor that has a gradient is written to where autograd does not see it, by `.data`, by `detach()` "
                "or under `no_grad`: write before the call, or without hiding it",
                source_line(node) or node.name,
            )


def hidden_write(gm: GraphModule) -> Node | None:
    """The first write in Dynamo's graph `gm` that autograd is not to see and that changes what is differentiable."""
    recording = torch.is_grad_enabled()
    differentiated = set[int]()  # the storages of tensors that ask for a gradient, or have one
    hidden, recorded = None, False
    for node in gm.graph.nodes:
        if called(node) == "_set_grad_enabled":
            recording = bool(node.args[0])
            continue
        for written in written_tensors(node) if hidden is None else ():
            if storage_of(written) in differentiated if not recording else _after_a_detach(node, written):
                hidden = node
        if has_gradient(node) and (storage := storage_of(node)) is not None:
            differentiated.add(storage)
            recorded = recorded or recording and node.op != "placeholder"
    return hidden if recorded else None  # a frame that records nothing has no gradients: an optimizer's


def data_as_detached(gm: GraphModule) -> GraphModule:
    """`gm` itself where nothing in it asks for `.data`, else a copy with `detach()`, which is the same in a functional
    graph: up to torch 2.11 export knows the latter alone."""
    found = [n for n in gm.graph.nodes if called(n) == "_get_data_attr"]
    return changed(gm, found, lambda node: setattr(node, "target", torch.detach))


def written_tensors(node: Node) -> Iterator[Node]:
    """The tensors that the call `node` writes to."""
    if node.op not in ("call_function", "call_method"):
        return
    found = []
    if (schema := getattr(node.target, "_schema", None)) is not None:
        given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | node.kwargs
        found = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    elif node.args:
        if named_in_place(called(node)) or node.kwargs.get("inplace") is True:
            found = [node.args[0]]
    for entry in (*found, node.kwargs.get("out")):
        for one in entry if isinstance(entry, list | tuple) else (entry,):
            if isinstance(one, Node) and isinstance(dynamo_value(one), torch.Tensor):
                yield one


def _after_a_detach(write: Node, written: Node) -> bool:
    """Whether `written` is a part of a tensor that was detached from its history, and the tensor, or what is written,
    has a gradient."""
    def is_view(node: Node) -> bool:
        source = node.args[0] if node.args and node.op != "placeholder" else None
        return isinstance(source, Node) and storage_of(source) == storage_of(written) is not None

    node = through(written, lambda n: is_view(n) and called(n) not in _DETACHES)
    values = [a for a in write.all_input_nodes if a is not written]
    return is_view(node) and any(map(has_gradient, (node.args[0], *values)))


def has_gradient(node: Node) -> bool:
    """Whether `node` is a tensor that asks for a gradient."""
    fake = dynamo_value(node)
    return isinstance(fake, torch.Tensor) and fake.requires_grad


def storage_of(node: Node) -> int | None:
    """What tells the memory of `node`'s tensor from others'; None for what has none of its own."""
    return storage_id(dynamo_value(node))


def storage_id(fake: object) -> int | None:
    """What tells the memory of a fake tensor from others'; None for what has none of its own, or is no tensor."""
    if not isinstance(fake, torch.Tensor) or is_traceable_wrapper_subclass(fake) or fake.layout != torch.strided:
        return None
    try:
        return fake.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of functorch's, within a transform
        return None
