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
from megacpp_compile.remat.tagging import TagForRemat, Tell


def to_openxla(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    target: str,
    config: Config,
    patches: dict[str, Any],
    tell: Tell | None = None,
    kernels: Any = None,
) -> Callable[..., Any]:
    """Compile a rewritten graph with openxla. patches: Inductor's, which mean nothing here and are named in the log;
    tell, kernels: as in `handoff.to_inductor`."""
    lower = LowerSemanticOps(target, config)

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lower(graph.graph)
        graph.recompile()
        return _program(graph, inputs)

    return _compile(gm, example_inputs, config, patches, tell, kernels or compiler)


def plain_openxla(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    patches: dict[str, Any],
    tell: Tell | None = None,
    kernels: Any = None,
) -> Callable[..., Any]:
    """Compile a frame exactly as `backend="openxla"` would, but for the policy, if there is one."""
    return _compile(gm, example_inputs, config, patches, tell, kernels or _program)


def _program(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.torchxla import openxla_eval_boxed

    return openxla_eval_boxed(graph, inputs)  # type: ignore[arg-type,no-any-return]


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, patches: dict[str, Any], tell: Tell | None,
    compiler: Callable[..., Any],
) -> Callable[..., Any]:  # fmt: skip
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    if patches:
        log.logger.warning("settings of Inductor have no effect on an XLA device: %s", ", ".join(sorted(patches)))
    policy = config.policy
    settings: dict[str, Any] = {"fw_compiler": compiler}
    if policy is not None:

        def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
            TagForRemat(policy, dict(config.block_kinds), tell=tell)(joint.graph)
            return default_partition(joint, inputs, **kwargs)  # which obeys tags, where there are any

        settings["partition_fn"] = partition
    return aot_autograd(**settings)(gm, example_inputs)  # type: ignore[no-any-return]
