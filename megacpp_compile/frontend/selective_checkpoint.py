"""What a selective checkpoint region saves, asked before its ops are gone.

The `context_fn` of `torch.utils.checkpoint` brings a policy that is called with every ATen op of a region, in order,
and may count them. So the region's body runs once on fake tensors, as eager would dispatch it, and each node of
Dynamo's graph learns what was decided of the ops it is made of. The partitioner obeys such tags, and an op that takes
the place of several nodes has the tag of its result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from megacpp_compile._torch.dispatch import SelectiveContext
from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.errors import CaptureError
from megacpp_compile.frontend.opaque_ops import refake

Decisions = dict[Node, CheckpointPolicy]

_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def decide(body: GraphModule, context_fn: Callable[[], Any], args: Sequence[Any], mode: FakeTensorMode) -> Decisions:
    """What the policy of `context_fn` decides of each node of `body` that calls an op, called with values like
    `args`, which are Dynamo's own fake ones.

    A node of several ops, such as a bias behind a GEMM, is saved if one of them is: what is a view takes no memory.
    Raises CaptureError where `context_fn` gives no policy to ask.
    """
    context, _ = context_fn()
    if not isinstance(context, SelectiveContext):
        raise CaptureError(
            f"the context_fn of a checkpoint region gives a {type(context).__name__}, which cannot be asked what it "
            "saves: make it with torch.utils.checkpoint.create_selective_checkpoint_contexts"
        )
    policy, decided = context.policy_fn, Decisions()

    class Region(fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            self.node = n
            return super().run_node(n)

    region = Region(body)

    def asked(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        answer = policy(context, op, *args, **kwargs)
        if isinstance(answer, bool):
            answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        if decided.get(region.node) not in _SAVED:
            decided[region.node] = answer
        return answer

    context.policy_fn = asked
    unnamed = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else contextlib.nullcontext()
    inputs = [refake(arg, mode) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with mode, unnamed, context:
        region.run(*inputs)
    return decided
