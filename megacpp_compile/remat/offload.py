"""Offloading: saved values wait for their backward in pinned main memory.

torch's own facilities do not fit: `torch.autograd.graph.save_on_cpu` offloads all that a region saves;
`CheckpointPolicy.MUST_CPU_OFFLOAD` and `torch._functorch.config.enable_activation_offloading` are newer than torch 2.9,
and the latter's plain form copies to memory that is not pinned. Every torch from 2.9 on has Inductor's
`custom_partitioner_fn`: after torch's partitioner has run, the forward graph returns copies in pinned memory instead of
the chosen values, and the backward graph copies them back before their first reader.

The copies run on a stream of their own (`host_copies.py`). What the graphs' order has to be is said in operands, as
Inductor moves nodes that nothing holds: a value lives until `await_offload`, which reads one of the next layer, too;
the first value that backward needs is asked for by `prefetch` at its beginning, and each of the others by the `reload`
of the one before it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
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
from megacpp_compile.remat.host_copies import host_copies
from megacpp_compile.remat.plan import BlockRef, Plan, kept_bytes, last_layer, leaves_layer

# The key in `meta` of offloaded nodes of the joint graph, with their layer; torch's partitioner copies it to its two
# graphs.
MARK = "megacpp_offload"
# Values of fewer bytes stay on the device under "all": their copies cost more in launches than they free.
LEAST = 1 << 20


# What CUDA graphs cannot hold: Inductor captures what is around it.
UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("megacpp::offload", mutates_args=(), tags=UNSAFE)
def offload(x: Tensor) -> Tensor:
    """`x` in main memory, with its strides; pinned where `x` is on a GPU. The copy is done behind `await_offload`."""
    return host_copies(x.device).leave(x)


@offload.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


@torch.library.custom_op("megacpp::await_offload", mutates_args=("there",), tags=UNSAFE)
def await_offload(x: Tensor, there: Tensor, after: Tensor) -> None:
    """Behind `after`: `x`, whose copy is `there`, may be overwritten from here on."""
    host_copies(x.device).left(there)


@torch.library.custom_op("megacpp::reload", mutates_args=(), tags=UNSAFE)
def reload(x: Tensor, device: torch.device) -> Tensor:
    """`x`, from main memory, on `device`, with its strides."""
    return host_copies(device).back(x)


@reload.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


# `before` is not written: what reads it comes after the call. A custom op would count a write to a gradient that the
# model may keep.
torch.library.define("megacpp::prefetch", "(Tensor x, Tensor(a!) before) -> ()", tags=UNSAFE)


@torch.library.impl("megacpp::prefetch", "CompositeExplicitAutograd")
def _prefetch(x: Tensor, before: Tensor) -> None:
    """Begin to copy `x`, from main memory, to the device of `before`, in front of what reads that."""
    host_copies(before.device).ask(x)


@torch.library.register_fake("megacpp::prefetch")
def _(x: Tensor, before: Tensor) -> None:
    return None


_PINNED = "the host hands out pinned memory while it runs"
_OPS = ("offload", "await_offload", "reload", "prefetch")
declare({f"megacpp::{name}": OpTraits(uncapturable=_PINNED) for name in _OPS})


def offloaded(plan: Plan, blocks: Mapping[Node, BlockRef], policy: CheckpointingPolicy) -> dict[Node, str]:
    """The saved values of `plan` that `policy` offloads, with their layers. Those of the last layer stay: backward
    reads them at once."""
    if policy.offload == "none":
        return {}
    last = last_layer(blocks.values())
    early = {n: blocks[n].layer for n in plan.saved if blocks[n].layer != last and not is_view(n)}
    if policy.offload == "inputs":
        return {n: at for n, at in early.items() if isinstance(n.meta.get("val"), Tensor) and leaves_layer(n, blocks)}
    return {n: at for n, at in early.items() if kept_bytes(n) >= LEAST}


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
    own = dict.fromkeys(n for n in results[:outputs] if isinstance(n, Node))
    away = [n for n in _marked(results[outputs:], own) if (held := holders.get(n.name)) is not None and held.users]
    place = {n: i for i, n in enumerate(forward.graph.nodes)}
    away.sort(key=place.__getitem__)
    copies = {n: _leave(forward, n) for n in away}
    for node in away:
        later = next((n for n in away if n.meta[MARK] != node.meta[MARK] and place[n] > place[node]), None)
        after = later or next((n for n in own if _on_device_of(node, n)), node)
        with forward.graph.inserting_before(copies[later].next if later is not None else last):
            forward.graph.call_function(
                torch.ops.megacpp.await_offload.default, (node, copies[node], after)
            ).meta["val"] = None
    last.args = (type(last.args[0])([copies.get(r, r) for r in results]),)  # type: ignore[call-arg,arg-type]
    _return(backward, {holders[n.name]: n for n in away}, copies)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return [n.name for n in away]


def _leave(forward: GraphModule, node: Node) -> Node:
    """The copy of `node` in main memory, begun as soon as it is there."""
    made = node
    while made.next.op == "placeholder":
        made = made.next
    with forward.graph.inserting_after(made), value(node).fake_mode:
        there = forward.graph.call_function(torch.ops.megacpp.offload.default, (node,))
        there.meta["val"] = torch.ops.megacpp.offload(value(node))
    return there


def _return(backward: GraphModule, holders: Mapping[Node, Node], copies: Mapping[Node, Node]) -> None:
    """Copy what `holders` (a placeholder of `backward`: its node of the forward) wait for back to the device."""
    graph = backward.graph
    needed = sorted(holders, key=lambda holder: min(holder.users))
    gradients = [n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name]
    first = next((g for h in needed[:1] for g in gradients if _on_device_of(holders[h], g)), None)
    begin = next(n for n in graph.nodes if n.op != "placeholder")
    for holder in needed:
        held = copies[holders[holder]].meta["val"]
        device = value(holders[holder]).device
        with graph.inserting_before(min(holder.users)), held.fake_mode:
            here = graph.call_function(torch.ops.megacpp.reload.default, (holder, device))
            here.meta["val"] = torch.ops.megacpp.reload(held, device)
        holder.replace_all_uses_with(here, delete_user_cb=lambda user, here=here: user is not here)
        holder.meta = {**holder.meta, "val": held}
        holder.meta.pop("tensor_meta", None)
    if first is not None:
        with graph.inserting_before(begin):
            graph.call_function(torch.ops.megacpp.prefetch.default, (needed[0], first)).meta["val"] = None


def _on_device_of(node: Node, other: Node) -> bool:
    held = other.meta.get("val")
    return isinstance(held, Tensor) and held.device == value(node).device


def _marked(saved: Sequence[Any], own: Container[Node]) -> Iterator[Node]:
    """The marked tensors among `saved`, without the model's `own` results."""
    for node in dict.fromkeys(n for n in saved if isinstance(n, Node)):
        held = node.meta.get("val")
        if MARK in node.meta and node not in own and isinstance(held, Tensor):
            yield node
