"""Stages 5 and 6 for XLA devices: lower the semantic ops after autograd and give the rest to openxla.

openxla takes each of AOTAutograd's two graphs, replays it on lazy tensors and compiles what they recorded as one HLO
program. The lowerings go in just before, so that XLA sees nothing but ATen; how a program is fused is XLA's own choice.
`torch_xla` is imported when a frame is compiled, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from megacpp_compile import log
from megacpp_compile.config import Config
from megacpp_compile.handoff import LowerSemanticOps
from megacpp_compile.remat.tagging import TagForRemat, Tell, recompute_views


def to_openxla(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    target: str,
    config: Config,
    patches: dict[str, Any],
    tell: Tell | None = None,
    kernels: Any = None,
    copies: int = 1,
    program: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compile a rewritten graph with openxla. patches: Inductor's, which mean nothing here and are named in the log;
    tell, kernels, copies: as in `handoff.to_inductor`; without a use for the last,
    as nothing predicts the peak of a program of XLA's. program: what makes one of a lowered graph, for openxla."""
    lower = LowerSemanticOps(target, config)
    made = program or (_spread if config.sharding is not None else _program)

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lower(graph.graph)
        graph.recompile()
        return made(graph, inputs)

    # XLA has to write each saved view as a tensor of its own: every transposed weight, every unsqueezed table.
    return differentiated(gm, example_inputs, config, patches, tell, kernels or compiler, views_again=True)


def plain_openxla(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    patches: dict[str, Any],
    tell: Tell | None = None,
    kernels: Any = None,
    copies: int = 1,
) -> Callable[..., Any]:
    """Compile a frame exactly as `backend="openxla"` would, but for a policy or a sharding plan, if there is one."""
    program = _spread if config.sharding is not None else _program
    return differentiated(gm, example_inputs, config, patches, tell, kernels or program)


def _program(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.torchxla import openxla_eval_boxed

    return openxla_eval_boxed(graph, inputs)  # type: ignore[arg-type,no-any-return]


def _spread(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`_program`, for several devices."""
    from megacpp_compile.sharding.products import keep_batches

    keep_batches(graph.graph)
    graph.recompile()
    return _program(graph, inputs)


def differentiated(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, patches: dict[str, Any], tell: Tell | None,
    compiler: Callable[..., Any], views_again: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Compile both halves of a frame with `compiler`. views_again: compute in backward the views it reads; openxla by
    itself saves whatever backward reads."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    if patches:
        log.logger.warning("settings of Inductor have no effect on an XLA device: %s", ", ".join(sorted(patches)))
    policy = config.policy

    def tagged(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        if policy is not None:
            TagForRemat(policy, dict(config.block_kinds), tell=tell)(joint.graph)
        elif views_again or config.sharding is not None:
            # A parameter gathered for forward is gathered again, not kept whole on every device until backward.
            recompute_views(joint.graph, _gathering() if config.sharding is not None else frozenset())
        return default_partition(joint, inputs, **kwargs)  # which obeys tags where there are any

    return aot_autograd(fw_compiler=compiler, partition_fn=tagged)(gm, example_inputs)  # type: ignore[no-any-return]


def _gathering() -> frozenset[Any]:
    import megacpp_compile.sharding.layout  # noqa: F401  registers the op

    return frozenset({torch.ops.megacpp.laid_out.default})
