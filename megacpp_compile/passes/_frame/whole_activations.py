"""Advice for tensor parallelism without sequence parallelism, under which every rank keeps what passes between blocks
whole.

A block's last linear leaves partial sums. Where they are summed into a tensor that each rank has all tokens of, as
`RowwiseParallel` does by default, residuals, norms and dropouts are computed and saved on every rank; sequence
parallelism (Korthikanti et al., arXiv:2205.05198) leaves each rank its tokens, for the same bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from megacpp_compile._torch.context_parallel import several_ranks
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.frontend.dtensors import activations_in, is_dtensor, leaves
from megacpp_compile.fx.edit import all_nodes, dynamo_value
from megacpp_compile.fx.provenance import module_fqn, source_line
from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.report.records import MissedFusion
from megacpp_compile.report.text import bytes_text, plural

TAG = "replicated-activations"
REMEDY = (
    "SequenceParallel of torch.distributed.tensor.parallel for the norms, RowwiseParallel to Shard(1) behind a "
    "block and PrepareModuleInput, from Shard(1) to Replicate(), in front of it leave each rank its tokens"
)


def whole_activations(gm: GraphModule) -> list[MissedFusion]:
    """One line for a frame, as Dynamo has it, in which ranks sum activations and each keeps all tokens; none where
    tokens are sharded over ranks in it. Warned of once."""
    if not several_ranks():
        return []
    nodes = all_nodes(gm)
    found = [(node, value, axis) for node in nodes for value, axis in _summed(node)]
    if not found:
        return []
    node, first, axis = found[0]
    if any(_by_tokens(value, first, axis) for n in nodes for value in _activations(n)):
        return []
    ranks, size = first.device_mesh.size(axis), sum(nbytes(value) for _, value, _ in found)
    reason = (
        f"tensor parallelism without sequence parallelism: each of {ranks} ranks keeps {plural(len(found), 'sum')} of "
        f"this frame whole, {bytes_text(size)}, of which {bytes_text(size // ranks)} would be its own tokens'"
    )
    warn_once(f"{reason}, as first at {module_fqn(node) or source_line(node)}. {REMEDY}.")
    return [MissedFusion("tensor_parallel", module_fqn(node), source_line(node), node.name, TAG, reason)]


def _activations(node: Node) -> Iterator[Any]:
    """The DTensors with tokens and channels that a call gives."""
    return activations_in(dynamo_value(node) if node.op.startswith("call") else None)


def _summed(node: Node) -> Iterator[tuple[Any, int]]:
    """(activation, axis of the mesh) where a call sums the parts of ranks, and gives the sum to each of them."""
    parts = [leaf for a in node.all_input_nodes for leaf in leaves(dynamo_value(a)) if is_dtensor(leaf)]
    for value in _activations(node):
        for axis, placed in enumerate(value.placements):
            several = value.device_mesh.size(axis) > 1 and value.requires_grad
            partial = any(p.device_mesh == value.device_mesh and p.placements[axis].is_partial() for p in parts)
            if several and partial and placed.is_replicate():
                yield value, axis
                break


def _by_tokens(value: Any, whole: Any, axis: int) -> bool:
    """Whether `value`, of three dimensions, is sharded by its tokens over the ranks that `whole` is the sum of."""
    if value.dim() != 3 or value.device_mesh != whole.device_mesh:
        return False
    placed = value.placements[axis]
    return placed.is_shard() and placed.dim % 3 < 2
