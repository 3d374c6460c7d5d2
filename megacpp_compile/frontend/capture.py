"""Captures Dynamo's torch-level graph as one functional, pre-dispatch ATen graph with fake metadata.

Before autograd, so that a semantic op can own its backward; pre-dispatch, so that `aten.linear`, `aten.rms_norm` and
`aten.scaled_dot_product_attention` are still whole; functional, so that slice assignments are values (`slice_scatter`).
Torch does the tracing (`aot_export_module`); this file keeps what that drops: placeholder order and identity, Dynamo's
input metadata, and the writes to inputs, which come back as a `copy_` epilogue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.fx import GraphModule, Node

from megacpp_compile._torch import modes
from megacpp_compile._torch.dispatch import AsyncCollectiveTensor, is_traceable_wrapper_subclass
from megacpp_compile._torch.fakes import FakeTensor, FakeTensorMode, detect_fake_mode
from megacpp_compile._torch.guards import TracingContext
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend import autocast, opaque_ops, sdpa_regions
from megacpp_compile.frontend.checkpoint import inline_checkpoints
from megacpp_compile.frontend.dtensor_writes import without_writes_to_new_tensors
from megacpp_compile.frontend.dtensors import calls_on_dtensors, is_dtensor
from megacpp_compile.frontend.export import export
from megacpp_compile.frontend.hidden_writes import data_as_detached, refuse_hidden_writes
from megacpp_compile.frontend.local_dtensors import localize
from megacpp_compile.frontend.noop_sets import without_noop_sets
from megacpp_compile.frontend.transforms import resolve_transforms
from megacpp_compile.frontend.unbacked_shapes import numbers_of
from megacpp_compile.frontend.undeclared_aliases import without_writes_to_undeclared_aliases
from megacpp_compile.frontend.written_constants import without_writes_to_constants
from megacpp_compile.report.records import MissedFusion

# In the metadata of a placeholder that is a parameter of a module, the same tensor in every call.
PARAMETER = "megacpp_parameter"
# In that of one that is a leaf with a gradient in float32, though it has 16 bits itself.
FLOAT32_GRADIENT = "megacpp_float32_gradient"


@dataclasses.dataclass
class Captured:
    """A captured frame.

    gm: the ATen graph; placeholders one to one with `example_inputs`, outputs as Dynamo's graph has them.
    fake_mode: the mode of every `node.meta["val"]`.
    weights: placeholders that are `nn.Parameter`s or ask for a gradient, i.e. what activations are computed from.
    trained: placeholders that ask for a gradient.
    given_up: parts of the frame that the passes cannot look into.
    """

    gm: GraphModule
    fake_mode: FakeTensorMode
    weights: frozenset[Node]
    trained: frozenset[Node] = frozenset()
    given_up: Sequence[MissedFusion] = ()


def fake_inputs(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """The frame's fake mode and its inputs as that mode knows them, with the symbolic sizes Dynamo gave them."""
    context = TracingContext.try_get()
    mode = (context.fake_mode if context else None) or detect_fake_mode(example_inputs)
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
            return value
        symbolic = context.tensor_to_context.get(value) if context else None
        source = getattr(symbolic, "tensor_source", None)
        return mode.from_tensor(
            value, static_shapes=None if context else True, symbolic_context=symbolic, source=source
        )

    return mode, [fake(x) for x in example_inputs]


def _check(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    for value in example_inputs:
        known = is_dtensor(value) or isinstance(value, AsyncCollectiveTensor)
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) and not known:
            raise CaptureError(f"an input is a tensor subclass ({type(value).__name__})")
    for module in gm.modules():
        if isinstance(module, GraphModule) and module is not gm:
            continue
        if any(True for _ in module.parameters(recurse=False)):
            raise CaptureError("the graph holds its own parameters instead of taking them as inputs")
    refuse_hidden_writes(gm)


def capture(gm: GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """The captured form of `gm`, traced on fake inputs. Never changes `gm`.

    Raises CaptureError, with the reason, for a frame that cannot be expressed this way; the caller then compiles `gm`
    as it came.
    """
    gm = without_noop_sets(gm)
    _check(gm, example_inputs)
    mode, fakes = fake_inputs(example_inputs)
    # What a collective under way returns is a plain tensor here; AOTAutograd is given it as it came, and waits for it.
    fakes = [opaque_ops.plain(fake, mode) if isinstance(fake, AsyncCollectiveTensor) else fake for fake in fakes]
    # Numbers that are known at run time only, or an input's, as every float is one under `dynamic=True`.
    if gm.graph.find_nodes(op="call_method", target="item") or numbers_of(gm):
        mode.allow_scalar_outputs = True  # Dynamo has let the frame read numbers from tensors
    try:
        with modes.restored(), fx_traceback.preserve_node_meta():
            gm = resolve_transforms(inline_checkpoints(data_as_detached(gm), mode), fakes, mode)
            plain = without_writes_to_undeclared_aliases(without_writes_to_new_tensors(without_writes_to_constants(gm)))
            on_dtensors = calls_on_dtensors(plain, example_inputs)
            local = localize(plain, mode, on_dtensors)
            if local is not plain:
                on_dtensors = calls_on_dtensors(local, example_inputs)
            sdpa_regions.mark(local.graph)
            made = opaque_ops.isolate_hops(local, fakes, mode, on_dtensors)
            given_up = opaque_ops.given_up(made)
            traced = autocast.as_real_regions(made.gm)
            buffers = list(traced.named_buffers(remove_duplicate=False))
            exported, signature = export(traced, made.fakes)
        _restore_interface(exported, signature, dict(buffers))
        if made.calls:
            opaque_ops.restore(exported, made)
        _forget_counts(mode)
    except CaptureError:
        raise
    except Exception as error:  # plain Inductor may compile what cannot be traced
        first = (str(error).strip() or "no message").splitlines()[0][:200]
        raise CaptureError(f"{type(error).__name__}: {first}") from error
    originals = [n for n in gm.graph.nodes if n.op == "placeholder"]
    copies = [n for n in exported.graph.nodes if n.op == "placeholder"]
    if len(originals) != len(copies):
        raise CaptureError("tracing changed the number of graph inputs")
    weights, trained = set(), set()
    for old, new, value in zip(originals, copies, example_inputs, strict=True):
        _inherit(old, new)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            trained.add(new)
        if isinstance(value, torch.nn.Parameter):
            weights.add(new)
            new.meta[PARAMETER] = True
        if isinstance(value, torch.Tensor) and _has_float32_gradient(value):
            new.meta[FLOAT32_GRADIENT] = True
    exported.meta.update(gm.meta)
    _inherit_sources(gm, exported)
    exported.recompile()
    return Captured(exported, mode, frozenset(weights | trained), frozenset(trained), given_up)


def _has_float32_gradient(leaf: torch.Tensor) -> bool:
    """Whether autograd gives `leaf`, of 16 bits, a gradient in float32. Within a wrapper subclass, as DTensor is one,
    gradients have the dtype that the whole has."""
    if leaf.dtype not in (torch.bfloat16, torch.float16) or not (leaf.is_leaf and leaf.requires_grad):
        return False
    # torch 2.9 knows no other dtype than the leaf's own.
    return getattr(leaf, "grad_dtype", None) == torch.float32 and not is_traceable_wrapper_subclass(leaf)


def _forget_counts(mode: FakeTensorMode) -> None:
    """Drop the unbacked symbols of this trace: the next makes its own, and would look for these in its outputs."""
    if (pending := getattr(mode.shape_env, "pending_fresh_unbacked_symbols", None)) is not None:
        pending.clear()


def _inherit(old: Node, new: Node) -> None:
    """Dynamo marks inputs (static address, source, FQN) on the placeholder itself; AOTAutograd reads it there."""
    for key, value in old.meta.items():
        if key not in ("val", "example_value"):
            new.meta[key] = value
    for name in ("_dynamo_source",):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    new.meta["dynamo_name"] = old.name


def _inherit_sources(old: GraphModule, new: GraphModule) -> None:
    """Where Dynamo found the tensors that a graph holds itself. AOTAutograd reads the marks of static addresses off
    placeholders of a graph that says so alone; CUDA graphs copy what has no such mark, and refuse to write to it."""
    found = getattr(old, "_param_name_to_source", None)
    if found is None:
        return
    of = {_attribute(name): source for name, source in found.items()}
    held = [name for each in (new.named_parameters, new.named_buffers) for name, _ in each(remove_duplicate=False)]
    given = [getattr(n, "_dynamo_source", None) for n in new.graph.nodes if n.op == "placeholder"]
    if all(name in of for name in held) and None not in given:
        sources = [*(of[name] for name in held), *given]
        if len(set(sources)) == len(sources):
            new._param_name_to_source = {name: of[name] for name in held}  # type: ignore[assignment]


def _attribute(buffer: str) -> str:
    """What a buffer of Dynamo's graph is called in ours."""
    return "_buffer_" + buffer.replace(".", "_")


def _restore_interface(gm: GraphModule, signature: Any, buffers: dict[str, torch.Tensor]) -> None:
    """Lifted buffers become attributes again, writes to inputs a `copy_` epilogue, outputs Dynamo's own tuple."""
    graph = gm.graph
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    if signature.parameters:
        raise CaptureError("the graph holds its own parameters instead of taking them as inputs")
    for name, buffer in signature.inputs_to_buffers.items():
        node = placeholders[name]
        gm.register_buffer(attribute := _attribute(buffer), buffers[buffer])
        with graph.inserting_before(node):
            get = graph.get_attr(attribute)
        get.meta.update(node.meta)
        node.replace_all_uses_with(get)
        graph.erase_node(node)
        placeholders[name] = get
    output = next(iter(reversed(graph.nodes)))
    values = list(output.args[0])
    by_output = {n.name: n for n in values if isinstance(n, Node)}
    writes = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    buffer_input = {b: i for i, b in signature.inputs_to_buffers.items()}
    with graph.inserting_before(output):
        for value, target in writes.items():
            destination = placeholders[buffer_input.get(target, target)]
            copy = graph.call_function(torch.ops.aten.copy_.default, (destination, by_output[value]))
            copy.meta["val"] = destination.meta.get("val")
    output.args = (tuple(values[len(writes) :]),)
    # Nodes above must precede the first computation for readability and for `placeholder` order.
    first = next(n for n in graph.nodes if n.op != "placeholder") if buffers else None
    if first is not None:
        for node in [n for n in graph.nodes if n.op == "placeholder"]:
            if node > first:
                first.prepend(node)
