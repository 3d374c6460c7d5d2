"""`megacpp::laid_out`: copies a tensor into another layout over the devices, and its gradient back into the first.

    laid_out(t, plan, forward, backward) -> t, pinned to the spec `forward`; d t is pinned to the spec `backward`

plan, forward, backward: a `ShardingPlan` and two specs, as JSON; t and d t have any shape and dtype. Off XLA devices
the op only copies. `gather` puts it between each parameter that is cut over a batch axis and its readers, and XLA then
gathers the parameter there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from megacpp_compile.config.sharding import ShardingPlan, Spec
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.sharding import pinning


@torch.library.custom_op("megacpp::laid_out", mutates_args=())
def laid_out(t: Tensor, plan: str, forward: str, backward: str) -> Tensor:
    copy = t.clone()
    if t.device.type == "xla":
        import torch_xla.distributed.spmd as spmd

        known = _plan(plan)
        # Not mark_sharding: the copy reports the layout of its source, which mark_sharding would not change.
        spmd.annotate_custom_sharding(copy, pinning.mesh(known), known.whole("", t.shape, _spec(forward)))
    return copy


@laid_out.register_fake
def _(t: Tensor, plan: str, forward: str, backward: str) -> Tensor:
    return torch.empty_like(t)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.plan, ctx.forward, ctx.backward = inputs


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.megacpp.laid_out(grad, ctx.plan, ctx.backward, ctx.forward), None, None, None


laid_out.register_autograd(_gradient, setup_context=_keep)
declare({"megacpp::laid_out": OpTraits()})


@functools.lru_cache(maxsize=16)
def _plan(text: str) -> ShardingPlan:
    return ShardingPlan(**json.loads(text))


def _spec(text: str) -> Spec:
    found = json.loads(text)
    return found and tuple(tuple(e) if isinstance(e, list) else e for e in found)


def gather(plan: ShardingPlan, gm: GraphModule, specs: Mapping[int, Spec]) -> None:
    """Insert `laid_out` behind every parameter of `gm` that is cut over a batch axis, in place.

    specs: position of a placeholder -> its spec.
    """
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = json.dumps({**plan.to_dict(), "rules": []})
    for i, spec in specs.items():
        used, node = plan.gathered(spec), holders[i]
        if used == spec or not node.users:
            continue
        with gm.graph.inserting_after(holders[-1]):
            args = (node, known, json.dumps(used), json.dumps(spec))
            new = gm.graph.call_function(torch.ops.megacpp.laid_out.default, args)
        for key in ("val", "example_value"):
            if key in node.meta:
                new.meta[key] = node.meta[key]
        node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    gm.recompile()
