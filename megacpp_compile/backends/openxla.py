"""Stages 5 and 6 for XLA devices: lower the semantic ops after autograd and give the rest to openxla.

openxla takes each of AOTAutograd's two graphs, replays it on lazy tensors and compiles what they recorded as one HLO
program. The lowerings go in just before, so that XLA sees nothing but ATen; how a program is fused is XLA's own choice.
`torch_xla` is imported when a frame is compiled, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile._torch.functorch import backward_with_forward, keep_saved_tensors
from megacpp_compile._torch.ops import aten
from megacpp_compile.backends._lower import LowerSemanticOps
from megacpp_compile.backends._protocol import Settings
from megacpp_compile.backends.automatic import Automatic
from megacpp_compile.config.options import Config
from megacpp_compile.fx.views import IDENTITIES
from megacpp_compile.remat.tagging import TagForRemat, keep_choices, recompute_views
from megacpp_compile.report import log
from megacpp_compile.sharding.gemms import keep_batches


def refusal(gm: GraphModule, patches: Mapping[str, Any], config: Config, grad: bool) -> str:
    """"": openxla compiles a program for each set of sizes."""
    return ""


def compile_lowered(
    gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, program: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Compile a rewritten graph with openxla. Nothing predicts the peak of a program of XLA's, so that
    `settings.copies` has no use. program: what makes one of a lowered graph, for openxla."""
    lower = LowerSemanticOps(settings.target, settings.config, report=settings.on_backward)
    made = program or _program_for(settings.config)

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        keep_saved_tensors()
        lower(graph.graph)
        graph.recompile()
        return made(graph, inputs)

    # XLA has to write each saved view as a tensor of its own: every transposed weight, every unsqueezed table.
    # It has no strides either, so that a copy is the value itself.
    again: dict[str, Any] = {"views_again": True, "read_originals": program is None}
    with backward_with_forward():  # as for Inductor: what fails later has nothing to fall back to
        return differentiated(gm, example_inputs, settings, compiler, **again)


def compile_plain(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile a frame as `backend="openxla"` would, but for a policy or a sharding plan, if there is one, and for
    results mixed up."""
    return differentiated(gm, example_inputs, settings, _program_for(settings.config))


def _program_for(config: Config) -> Callable[..., Any]:
    return _spread if config.sharding is not None else _program


def _program(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from megacpp_compile._torch.dynamo import openxla_eval_boxed

    _tell_results_apart(graph.graph)
    _name_dimensions(graph.graph)
    graph.recompile()
    return openxla_eval_boxed(graph, inputs)  # type: ignore[arg-type,no-any-return]


def _spread(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`_program`, for several devices."""
    keep_batches(graph.graph)
    graph.recompile()
    return _program(graph, inputs)


# To XLA a copy is the value itself.
_COPIES = IDENTITIES - {aten.contiguous.default} | {aten.detach.default}
# Those that may change dtype or shape, and which argument it is that they copy.
_CASTS = {aten._to_copy.default: 0, aten.copy.default: 1}


def _copied(node: Node) -> Node:
    """What `node` is a copy of, itself if of nothing."""
    while (source := _source(node)) is not None:
        node = source
    return node


def _source(node: Node) -> Node | None:
    if node.target in _COPIES:
        return node.args[0]  # type: ignore[return-value]
    of: Any = node.args[_CASTS[node.target]] if node.target in _CASTS else None  # type: ignore[index]
    return of if of is not None and _same_kind(node, of) else None


def _same_kind(*nodes: Node) -> bool:
    a, b = (node.meta.get("val") for node in nodes)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (a.dtype, a.device) == (b.dtype, b.device) and a.shape == b.shape


def _read_originals(graph: fx.Graph) -> None:
    """In a functional graph, what reads a copy of a computed value reads the value: saved for backward it is once then.
    Results stay copies, and so do those of inputs, which may be written to at the end."""
    for node in graph.nodes:
        if (root := _copied(node)) is not node and root.op == "call_function":
            node.replace_all_uses_with(root, lambda user: user.op != "output")
    graph.eliminate_dead_code()


def _tell_results_apart(graph: fx.Graph) -> None:
    """torch_xla's bridge to Dynamo (2.9) takes results that are copies of one value for one result, while the program
    returns them all: what comes behind is mixed up. A permutation of nothing makes them two, and costs nothing."""
    output = graph.find_nodes(op="output")[0]
    results = list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else []
    for i, node in enumerate(results):
        if isinstance(node, Node) and _copied(node) is not node and isinstance(node.meta.get("val"), torch.Tensor):
            with graph.inserting_before(output):
                results[i] = graph.call_function(aten.permute.default, (node, list(range(node.meta["val"].dim()))))
                results[i].meta = dict(node.meta)
    if results:
        output.args = (tuple(results),)


# Reductions that take a list of dimensions second.
_REDUCTIONS = (
    aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim, aten.var.correction,
)  # fmt: skip


def _name_dimensions(graph: fx.Graph) -> None:
    """Over no dimension by name ATen reduces all of them, and torch_xla (2.9) none."""
    for node in graph.nodes:
        if node.target not in _REDUCTIONS or not isinstance(node.args[0], Node):
            continue
        nothing: Any = [] if node.target in (aten.amax.default, aten.amin.default) else None
        if (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", nothing)) == []:
            every = list(range(node.args[0].meta["val"].dim()))
            node.args = (node.args[0], every, *node.args[2:])
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dim"}


def differentiated(
    gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, compiler: Callable[..., Any],
    views_again: bool = False, read_originals: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Compile both halves of a frame with `settings.inner_compile`, or else with `compiler`.

    views_again: compute in backward the views it reads; openxla by itself saves whatever backward reads.
    read_originals: read what copies are copies of, whatever its strides.
    """
    from megacpp_compile._torch.dynamo import aot_autograd
    from megacpp_compile._torch.functorch import default_partition

    config, policy, patches = settings.config, settings.config.own_policy, settings.patches
    automatic = Automatic.of(settings)
    if patches:
        log.logger.warning("settings of Inductor have no effect on an XLA device: %s", ", ".join(sorted(patches)))

    def tagged(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        def cut(joint: GraphModule) -> tuple[GraphModule, GraphModule]:
            if policy is None and (views_again or config.sharding is not None):
                # A parameter gathered for forward is gathered again, not kept whole on every device until backward.
                # Where a plan has tagged the graph, this leaves it as it is.
                recompute_views(joint.graph, _gathering() if config.sharding is not None else frozenset())
            if config.sharding is not None:
                keep_batches(joint.graph)  # before any product is chosen to be saved, as one with a merged dimension
            return default_partition(joint, inputs, **kwargs)  # which obeys tags where there are any

        if read_originals:
            _read_originals(joint.graph)
        if policy is None:
            keep_choices(joint.graph)
        else:
            TagForRemat(policy, dict(config.block_kinds), on_plan=settings.on_plan)(joint.graph)
        return cut(joint) if automatic is None else automatic.divide(joint, cut, kwargs["num_fwd_outputs"])

    return aot_autograd(fw_compiler=settings.inner_compile or compiler, partition_fn=tagged)(gm, example_inputs)  # type: ignore[no-any-return]


def _gathering() -> frozenset[Any]:
    import megacpp_compile.sharding.layout  # noqa: F401  registers the op

    return frozenset({torch.ops.megacpp.laid_out.default})
