"""torchtitan's GraphTrainer: ops in the one graph that it traces of a training step, and passes over that graph.

    from megacpp_compile.integrations import torchtitan
    torchtitan.register()                   # in each rank's process, before the trainer is made
    # then train with --compile.pass_pipeline megacpp

GraphTrainer traces forward, loss and backward by `make_fx`, behind autograd, and runs passes over the result. There an
op's forward could only be put in place together with its backward, so `record_ops` has the trace record both: Dynamo
and this package's passes look at the model while it is traced, and what is recorded is the graph that they made.
`save_pass` and `lowering_pass` are passes over the trace, in GraphTrainer's form. Nothing of this asks for torchtitan
but `register`; any trace by `make_fx` of a step that differentiates will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from megacpp_compile._torch import dynamo, modes
from megacpp_compile._torch.dispatch import proxy_mode
from megacpp_compile._torch.modules import compiled_call, eager_call, set_compiled_call
from megacpp_compile.backend import checked_options, compile_with, raises_own_errors
from megacpp_compile.backends import traced
from megacpp_compile.backends._lower import lower_traced
from megacpp_compile.config.options import Config
from megacpp_compile.errors import AlreadyCompiledError, BadOptionError
from megacpp_compile.frontend import unbacked_shapes
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.pipeline import Block
from megacpp_compile.report import log
from megacpp_compile.targets import resolve_target

__all__ = ["lowering_pass", "record_ops", "register", "save_pass"]

Model = TypeVar("Model", bound=nn.Module)
GraphPass = Callable[[GraphModule, Sequence[Any]], GraphModule]

# Passes of GraphTrainer's that compile or capture what is there then: ops are lowered ahead of the first.
_MAKE_CODE = (
    "annotate_flex_attention_for_regional_inductor_pass", "annotate_rmsnorm_for_regional_inductor_pass",
    "regional_inductor_pass", "full_inductor_compilation_pass", "insert_kernel_annotations_pass", "cudagraph_pass",
)  # fmt: skip
_DECIDES_MEMORY = "tag_with_memory_policy_pass"
_OF_THE_TRAINER = {
    "policy": "none, as GraphTrainer's memory_policy decides what backward recomputes",
    "cache_weight_casts": "False, as the trace is of one step",
    "sharding": "None, as the trace has what a rank computes",
    "repeated_blocks": "False, as the trace has every block",
    "inductor": "none, as GraphTrainer calls Inductor",
}


def register(name: str = "megacpp", options: Mapping[str, Any] | Config | None = None) -> None:
    """Make `--compile.pass_pipeline NAME` GraphTrainer's default passes with this package's among them, over a trace in
    which `record_ops` has put ops. Raises as `record_ops`, and ImportError without torchtitan 0.3."""
    config = _checked(options)
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
    from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY, POST_INIT_HOOKS

    def record(trainer: Any) -> None:
        for model in trainer.model_parts:
            record_ops(model, config)

    def passes(traced_result: Any, trainer_config: Any, **of_the_mesh: Any) -> list[Callable[..., GraphModule]]:
        found = construct_default_graph_passes(traced_result, trainer_config, **of_the_mesh)
        return with_passes(found, config)

    POST_INIT_HOOKS[name], PASS_PIPELINE_REGISTRY[name] = record, passes


def with_passes(
    passes: Sequence[Callable[..., GraphModule]], options: Mapping[str, Any] | Config | None = None
) -> list[Callable[..., GraphModule]]:
    """GraphTrainer's `passes` with `save_pass` behind its memory policy, and `lowering_pass` ahead of code."""
    found: list[Callable[..., GraphModule]] = []
    lower = functools.partial(lowering_pass, options=_checked(options))
    for each in passes:
        if lower not in found and _name(each) in _MAKE_CODE:
            found.append(lower)
        found += [each, save_pass] if _name(each) == _DECIDES_MEMORY else [each]
    return found if lower in found else [*found, lower]


def record_ops(model: Model, options: Mapping[str, Any] | Config | None = None) -> Model:
    """Have a trace by `make_fx` that calls `model` record the graph that this package's passes make of it, ops with
    their backward included; `model` itself is returned, and runs as before outside of a trace.

    options: fields of `Config`, or one; those that belong to the trainer are a BadOptionError. A model that Dynamo
    cannot take as one graph is recorded as it is written, with a warning, or under `strict` with Dynamo's error.
    Raises AlreadyCompiledError for a model that is compiled, TorchInternalsError where torch cannot compile frames
    within a trace (2.13 can), and the errors of `Config.from_options`.
    """
    config = _checked(options)
    if compiled_call(model) is not None:
        raise AlreadyCompiledError("", type(model).__name__)
    eager, block = eager_call(model), Block(backend=traced)

    @unbacked_shapes.traces_unbacked_shapes
    @raises_own_errors
    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with(gm, example_inputs, config, block=block)

    backend.config = config  # type: ignore[attr-defined]  # Dynamo's translation goes by it
    compiled = torch.compile(eager, backend=backend, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        if proxy_mode() is None:
            return eager(*args, **kwargs)
        try:
            with modes.trace_paused():
                return compiled(*args, **kwargs)
        except dynamo.Unsupported as error:
            if config.strict:
                raise
            log.logger.warning("%s is traced as it is written: %s", type(model).__name__, str(error).splitlines()[0])
        return eager(*args, **kwargs)

    set_compiled_call(model, call)
    return model


def save_pass(gm: GraphModule, example_inputs: Sequence[Any] = ()) -> GraphModule:
    """Of ops whose recomputation GraphTrainer's memory policy prefers, save those that are GEMMs, attention cores or
    choose by size, as it saves torch's own. What it must recompute ("full"), backward recomputes."""
    for node in _ops(gm):
        traits = traits_of(node)
        costs = traits.gemm or traits.core or traits.selection
        if costs and node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE:
            for saved in (node, *node.users):
                if "recompute" in saved.meta:
                    saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return gm


def lowering_pass(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | Config | None = None
) -> GraphModule:
    """Put what serves each op on this target in its place, forward and backward, in place; `gm` is returned. The nodes
    are marked for GraphTrainer's regional Inductor. Raises the errors of `Config.from_options`."""
    config = _checked(options)
    lower_traced(gm.graph, resolve_target(config.target, example_inputs), {"compile_with_inductor": {}})
    gm.recompile()
    return gm


def _ops(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in semantic_ops()]


def _name(graph_pass: Any) -> str:
    return str(getattr(getattr(graph_pass, "func", graph_pass), "__name__", ""))


def _checked(options: Mapping[str, Any] | Config | None) -> Config:
    config = checked_options(options)
    for option, wanted in _OF_THE_TRAINER.items():
        if option in config.asked and getattr(config, option):
            raise BadOptionError(option, getattr(config, option), wanted)
    if config.precision is not None and "fp8_delayed" in config.precision.recipes():
        raise BadOptionError("precision", "fp8_delayed", "a recipe without state from step to step, as 'fp8_current'")
    return config.without_auto()
