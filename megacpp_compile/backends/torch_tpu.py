"""Stages 5 and 6 for torch_tpu's devices ("tpu"), PyTorch's other way to XLA: the same lowerings, its own compiler.

As of release 0.2 (torch 2.11 to 2.15): importing torch_tpu registers a Dynamo backend "tpu", which differentiates a
graph by itself. A rewritten one is differentiated and lowered here first, and each half given to that backend as a
graph without gradients. Shapes are static there (`dynamic=False`), and a compiled program holds for the storage offsets
it was compiled with, so both are seen to. torch_tpu is never imported from here: who has a tensor on its device has.
It has not run on a TPU; docs/xla.md says what is untested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from megacpp_compile._torch.guards import tracing
from megacpp_compile.backends import openxla
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.config.options import Config
from megacpp_compile.errors import TargetUnavailableError
from megacpp_compile.fx.edit import dynamo_value
from megacpp_compile.report import log

NAME = "tpu"  # of its Dynamo backend, and of its device
_DECIDED = ("recompute", "ac_graph_id", "partitioner_tag", "autograd_backward")


def compile_lowered(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile a rewritten graph. Raises as `backend`."""
    backend()
    guard_offsets(gm)
    return openxla.compile_lowered(gm, example_inputs, settings, _program)


def compile_plain(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile a frame exactly as `backend="tpu"` would, but for the policy, if there is one."""
    compiler = backend()
    if settings.config.own_policy is None and settings.inner_compile is None:
        if settings.patches:
            log.logger.warning("settings of Inductor have no effect on a TPU: %s", ", ".join(sorted(settings.patches)))
        return compiler(gm, example_inputs)  # type: ignore[no-any-return]
    guard_offsets(gm)
    return openxla.differentiated(gm, example_inputs, settings, _program)


def backend() -> Callable[..., Any]:
    """torch_tpu's own. Raises TargetUnavailableError where nothing has registered it."""
    from megacpp_compile._torch.dynamo import InvalidBackend, lookup_backend

    try:
        return lookup_backend(NAME)
    except InvalidBackend:
        what, how = f"torch_tpu's Dynamo backend {NAME!r}", "import torch_tpu before compiling"
        raise TargetUnavailableError("tpu", what, how) from None


def refusal(gm: GraphModule, patches: Mapping[str, Any], config: Config, grad: bool) -> str:
    """Why torch_tpu takes a frame as it came only: its programs are of static shapes."""
    held = (dynamo_value(n) for n in gm.graph.find_nodes(op="placeholder"))
    sizes = (s for x in held for s in (x.shape if isinstance(x, torch.Tensor) else (x,)))
    if any(isinstance(s, torch.SymInt | torch.SymFloat | torch.SymBool) for s in sizes):
        return "sizes that are not known when compiling for torch_tpu: compile with dynamic=False"
    return ""


def guard_offsets(gm: GraphModule) -> None:
    """Have Dynamo compile anew for an input at another storage offset, as torch_tpu does for its own frames: its
    programs have the offsets of views in them, and Dynamo's guards say nothing of those."""
    from megacpp_compile._torch.dynamo import GuardBuilder, TensorProperty, TensorPropertySource, install_guard
    from megacpp_compile._torch.guards import TracingContext

    if TracingContext.try_get() is None:
        return
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        held = dynamo_value(node)
        if source is not None and isinstance(held, torch.Tensor):
            offset = TensorPropertySource(source, TensorProperty.STORAGE_OFFSET)
            install_guard(offset.make_guard(GuardBuilder.EQUALS_MATCH))


def _program(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch_tpu's program for a graph that is differentiated and lowered already."""
    from megacpp_compile._torch.functorch import make_boxed_func

    for node in graph.graph.nodes:  # what is computed again in backward has been decided, and would be once more
        for note in _DECIDED:
            node.meta.pop(note, None)
    # It would take Dynamo's notes on the frame, which describe the graph around, for notes on this half of it.
    with tracing(None), torch.no_grad():
        compiled = backend()(graph, inputs, options={"serializable": False})

    def call(*args: Any) -> Any:
        with torch.no_grad():
            return compiled(*args)

    return make_boxed_func(call)  # type: ignore[no-any-return]
