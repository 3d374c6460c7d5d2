"""Offloading: saved values wait for their backward in pinned main memory.

torch's own facilities do not fit: `torch.autograd.graph.save_on_cpu` offloads all that a region saves;
`CheckpointPolicy.MUST_CPU_OFFLOAD` and `torch._functorch.config.enable_activation_offloading` are newer than torch 2.9,
and the latter's plain form copies to memory that is not pinned. Every torch from 2.9 on has Inductor's
`custom_partitioner_fn`: after torch's partitioner has run, the forward graph returns copies in pinned memory instead of
the chosen values, and the backward graph copies them back before their first reader. The copies run on the model's
stream, in order with its kernels and not beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from megacpp_compile._torch.inductor import CustomPartitionerFn
from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.inductor_pass import source_hash
from megacpp_compile.fx.views import is_view
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.remat.plan import BlockRef, Plan, kept_bytes, last_layer, leaves_layer

# The key in `meta` of offloaded nodes of the joint graph; torch's partitioner copies it to its two graphs.
MARK = "megacpp_offload"
# Values of fewer bytes stay on the device under "all": their copies cost more in launches than they free.
LEAST = 1 << 20


# What CUDA graphs cannot hold: Inductor captures what is around it.
UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("megacpp::offload", mutates_args=(), tags=UNSAFE)
def offload(x: Tensor) -> Tensor:
    """`x` in main memory, with its strides; pinned where `x` is on a GPU."""
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return there.copy_(x, non_blocking=True)


@offload.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


@torch.library.custom_op("megacpp::reload", mutates_args=(), tags=UNSAFE)
def reload(x: Tensor, device: torch.device) -> Tensor:
    """`x`, from main memory, on `device`, with its strides."""
    here = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return here.copy_(x, non_blocking=True)


@reload.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


_PINNED = "the host hands out pinned memory while it runs"
declare({name: OpTraits(uncapturable=_PINNED) for name in ("megacpp::offload", "megacpp::reload")})


def offloaded(plan: Plan, blocks: Mapping[Node, BlockRef], policy: CheckpointingPolicy) -> list[Node]:
    """The saved values of `plan` that `policy` offloads. Those of the last layer stay: backward reads them at once."""
    if policy.offload == "none":
        return []
    last = last_layer(blocks.values())
    early = [n for n in plan.saved if blocks[n].layer != last and not is_view(n)]
    if policy.offload == "inputs":
        return [n for n in early if isinstance(n.meta.get("val"), Tensor) and leaves_layer(n, blocks)]
    return [n for n in early if kept_bytes(n) >= LEAST]


class Offload(CustomPartitionerFn):
    """A partitioner that runs torch's, or the user's (`before`), and then offloads the values marked with `MARK`."""

    def __init__(self, before: CustomPartitionerFn | None = None) -> None:
        self.before = before

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        from megacpp_compile._torch.functorch import min_cut_rematerialization_partition

        partition: Any = self.before or min_cut_rematerialization_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        move(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        return ("megacpp_offload", source_hash(), self.before.uuid() if self.before is not None else None)


def move(forward: GraphModule, backward: GraphModule, outputs: int) -> list[str]:
    """Offload the marked values that `forward` saves and reload them in `backward`, both edited in place; their names.

    outputs: how many of the forward's results are the model's own, and stay on the device.
    """
    holders = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    last = forward.graph.output_node()
    results = list(last.args[0])  # type: ignore[arg-type]
    own = {n for n in results[:outputs] if isinstance(n, Node)}
    moved = []
    for node in _marked(results[outputs:], own):
        holder = holders.get(node.name)
        if holder is None or not holder.users:
            continue
        device = value(node).device
        with forward.graph.inserting_before(_last_reader(node).next), value(node).fake_mode:
            there = forward.graph.call_function(torch.ops.megacpp.offload.default, (node,))
            there.meta["val"] = torch.ops.megacpp.offload(value(node))
        results = [there if r is node else r for r in results]
        with backward.graph.inserting_before(min(holder.users)), value(node).fake_mode:
            here = backward.graph.call_function(torch.ops.megacpp.reload.default, (holder, device))
            here.meta["val"] = torch.ops.megacpp.reload(there.meta["val"], device)
        holder.replace_all_uses_with(here, delete_user_cb=lambda user, here=here: user is not here)
        holder.meta = {**holder.meta, "val": there.meta["val"]}
        holder.meta.pop("tensor_meta", None)
        moved.append(node.name)
    last.args = (type(last.args[0])(results),)  # type: ignore[call-arg,arg-type]
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return moved


def _marked(saved: Sequence[Any], own: set[Node]) -> Iterator[Node]:
    """The marked tensors among `saved`, without the model's `own` results."""
    for node in dict.fromkeys(n for n in saved if isinstance(n, Node)):
        held = node.meta.get("val")
        if node.meta.get(MARK) and node not in own and isinstance(held, Tensor):
            yield node


def _last_reader(node: Node) -> Node:
    """The last node of the forward that reads the memory of `node`."""
    last, todo = node, [node]
    while last.next.op == "placeholder":
        last = last.next
    while todo:
        for user in todo.pop().users:
            if user.op != "output":
                last = max(last, user)
                if is_view(user):
                    todo.append(user)
    return last
