"""The plain types of remat: what a plan decides, which block a node is in, what a graph shares its device with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.fx.view_chains import base_of, beyond_views
from megacpp_compile.remat.joint_graph import backward_nodes

# What is decided of a forward node. RECOMPUTE may give way to SAVE where that costs no bytes; MUST_RECOMPUTE may not.
# FREE: torch's partitioner decides.
SAVE, RECOMPUTE, FREE, MUST_RECOMPUTE = "save", "recompute", "free", "must recompute"

# The caching allocator rounds to this many bytes.
_ALLOCATION = 512


@dataclasses.dataclass(frozen=True)
class BlockRef:
    """The block that a node is in.

    Attributes:
        layer: the layer's FQN, "" for the frame itself; in a loop over depth with the number of the call, "mtp@1".
        block: the block's FQN, None between blocks.
        kind: one of `config.checkpointing.KINDS`, or "" where none is known.
        repeated: whether the layer is a call in a loop over depth, beside layers that are not.
    """

    layer: str
    block: str | None
    kind: str
    repeated: bool = False


@dataclasses.dataclass(eq=False)
class Plan:
    """What backward finds saved and what it recomputes.

    Attributes:
        saved, recomputed: forward nodes in graph order.
        free: nodes that backward needs and that are left to torch's partitioner.
    """

    saved: list[Node]
    recomputed: list[Node]
    free: list[Node]

    def saved_bytes(self) -> int:
        return sum(map(kept_bytes, self.saved))

    def with_replaced(self, replaced: Mapping[Node, Node]) -> Plan:
        """The same plan of a graph in which other nodes stand in the place of some. replaced: those by these."""

        def now(nodes: list[Node]) -> list[Node]:
            return list(dict.fromkeys(base_of(replaced[n], through_items=False) if n in replaced else n for n in nodes))

        return Plan(now(self.saved), now(self.recomputed), now(self.free))


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What a graph shares its device with in a training step.

    Attributes:
        copies: how many graphs like it run in a step, itself included.
        given: bytes allocated on the device when it was compiled, 0 where nothing counts them.
        inputs: positions, among its `of` inputs, of those that are activations.
        of: the number of its inputs.
    """

    copies: int = 1
    given: int = 0
    inputs: tuple[int, ...] = ()
    of: int = 0

    def activations(self, graph: fx.Graph) -> list[Node]:
        """The inputs of the joint graph that are activations; [] where they cannot be told from parameters."""
        late = backward_nodes(graph)
        holders = [n for n in graph.nodes if n.op == "placeholder" and n not in late]
        return [holders[i] for i in self.inputs] if len(holders) == self.of else []

    def passed_on(self, graph: fx.Graph, policy: CheckpointingPolicy) -> list[Node]:
        """The inputs that wait in main memory: where every block is a graph, the output of the block before."""
        return self.activations(graph) if self.copies > 1 and policy.offload != "none" else []

    def before(self, graph: fx.Graph) -> int:
        """Bytes allocated before a step; at least those of the graph's inputs."""
        late = backward_nodes(graph)
        holders = {n for n in graph.nodes if n.op == "placeholder" and n not in late}
        passed = set(self.activations(graph))
        own = sum(allocated_bytes(n.meta.get("val")) for n in holders - passed)
        return max(self.given, self.copies * own + sum(allocated_bytes(n.meta.get("val")) for n in passed))


ALONE = StepContext()


def kept_bytes(node: Node) -> int:
    """Bytes that saving `node` keeps alive; 0 for an op with several results, whose items are nodes of their own."""
    held = node.meta.get("val")
    return nbytes(held) if isinstance(held, torch.Tensor) else 0


def allocated_bytes(value: Any) -> int:
    """Bytes that the caching allocator hands out for a fake tensor."""
    return -(-nbytes(value) // _ALLOCATION) * _ALLOCATION if isinstance(value, torch.Tensor) else nbytes(value)


def last_layer(blocks: Iterable[BlockRef]) -> str | None:
    """The layer of the last of `blocks`, which are in graph order; None where there are not several layers."""
    layers = list(dict.fromkeys(b.layer for b in blocks if b.kind and b.layer))
    return layers[-1] if len(layers) > 1 else None


def leaves_layer(node: Node, blocks: Mapping[Node, BlockRef]) -> bool:
    """Whether a node of another layer reads `node`."""
    return any(u in blocks and blocks[u].layer != blocks[node].layer for u in beyond_views(node))
