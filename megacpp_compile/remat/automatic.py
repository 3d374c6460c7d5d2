"""`policy="auto"`: a plan for a frame by predicted time and memory, beside what torch's partitioner makes of it.

The rule. Let T be the predicted time of a step as torch's partitioner has it (`policy="none"`).

- A latent is kept where its down-projection takes longer than writing and reading it: recomputing it would free fewer
  bytes a second than the memory moves. Only the width of the input matters: above 370 channels on sm_90 in bfloat16.
- What "selective" recomputes is recomputed as long as the step is predicted to take at most 1.02 T: first what Inductor
  fuses (norms, activations), then in all layers but the last what is a kernel of its own (rotations, the up-projections
  of keys and values), each layer by layer in the order they run.
- That plan is taken where it saves fewer bytes than the partitioner and lowers the predicted peak of the step by at
  least 2 %. So a block by itself is left to the partitioner: its backward reads at once what its forward has saved.

All of it is a function of the graph and of a table of rates: every rank that has the same graph makes the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.sizes import hint, nbytes, rows
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.remat.closure import settle
from megacpp_compile.remat.decisions import SaveDecisions
from megacpp_compile.remat.latents import may_hand_over
from megacpp_compile.remat.plan import RECOMPUTE, SAVE, BlockRef, Plan, last_layer
from megacpp_compile.targets.rates import Rates

# What recomputing may cost, of the predicted time of a step; and what of its predicted peak it has to spare.
MOST, LEAST_SPARED = 0.02, 0.02
# Bytes that backward reads of the forward, from which a frame is planned: below, there is nothing to spare.
LEAST_READ = 32 << 20

# The policies that the steps of the ladder are taken from: what is cheap, and the up-projections too.
SELECTIVE = CheckpointingPolicy(depth_loop="kinds")
CHEAP = dataclasses.replace(SELECTIVE, recompute_kv_upproj=False)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Of one plan: bytes saved for backward, bytes of a step at its peak, recomputed nodes, seconds of a step more than
    under torch's own partition."""

    saved: int
    peak: int
    recomputed: int
    more: float = 0.0


@dataclasses.dataclass(frozen=True)
class Latents:
    """Of the latents of a frame: how many are `kept`, how many `recomputed`; bytes that are held for those kept, and
    seconds that recomputing them would take. held: by the place of its op among those that could keep one, the bytes of
    each."""

    kept: int = 0
    recomputed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    held: list[list[int]] = dataclasses.field(default_factory=list)


class Ladder:
    """Plans from what torch's partitioner makes of a graph (no step) to what "selective" does, each saving less.

    forward, needed, blocks: as of `make_plan`. none: what the partitioner saves and recomputes of `forward`.
    """

    def __init__(
        self, forward: Sequence[Node], needed: Sequence[Node], blocks: Mapping[Node, BlockRef], none: Plan
    ) -> None:
        self.forward, self.needed, self.blocks = forward, needed, blocks
        self.selective = SaveDecisions(forward, blocks, SELECTIVE).of
        cheap = SaveDecisions(forward, blocks, CHEAP).of
        self.none = {**cheap, **dict.fromkeys(none.saved, SAVE), **dict.fromkeys(none.recomputed, RECOMPUTE)}
        self.fused = {n: cheap[n] if _fuses(base_of(n)) else self.none[n] for n in forward}
        last = last_layer(blocks.values())
        self.layers = list(dict.fromkeys(blocks[n].layer for n in forward))
        self.repeated = [layer for layer in self.layers if layer != last]
        self.steps = len(self.layers) + len(self.repeated)

    def plan(self, steps: int) -> Plan:
        """The plan `steps` up."""
        fused, all_of = set(self.layers[:steps]), set(self.repeated[: max(steps - len(self.layers), 0)])
        layer = {n: self.blocks[n].layer for n in self.forward}
        decisions = {
            n: (self.selective if layer[n] in all_of else self.fused if layer[n] in fused else self.none)[n]
            for n in self.forward
        }
        return settle(self.forward, self.needed, decisions)

    def within(self, costs: Callable[[Plan], float], allowed: float) -> Plan:
        """The plan of the most steps that costs at most `allowed` seconds; that of none where one step is too many.

        costs: the seconds that a step of training takes more under a plan than under torch's partition.
        """
        low, high, best = 1, self.steps, self.plan(0)
        while low <= high:  # the cost grows with the steps
            middle = (low + high) // 2
            found = self.plan(middle)
            if costs(found) <= allowed:
                best, low = found, middle + 1
            else:
                high = middle - 1
        return best


def _fuses(node: Any) -> bool:
    return isinstance(node, Node) and traits_of(node).kernel in ("pointwise", "reduction")


def worth_taking(plan: Predicted, otherwise: Predicted) -> bool:
    """Whether the plan saves fewer bytes than what it stands beside, and peaks lower by as much as is asked for."""
    return plan.saved < otherwise.saved and plan.peak <= (1 - LEAST_SPARED) * otherwise.peak


def latents_of(graph: fx.Graph, rates: Rates) -> tuple[list[Node], Latents]:
    """(the ops whose latents are to be kept, which hand none over yet; what that comes to)."""
    kept, found = [], Latents()
    ops = [n for n in graph.nodes if n.op == "call_function" and traits_of(n).handed_over is not None]
    for place, op in enumerate(ops):
        if not may_hand_over(op):
            continue
        seconds, held, width = _price(op, rates)
        if seconds > 2 * width / rates.bytes:
            kept.append(op)
            found = Latents(
                found.kept + 1, found.recomputed, found.bytes + held, found.seconds + seconds,
                [*found.held, [place, held]],
            )  # fmt: skip
        else:
            found = dataclasses.replace(found, recomputed=found.recomputed + 1)
    return kept, found


def _price(op: Node, rates: Rates) -> tuple[float, int, int]:
    """(seconds of computing the latent of `op` again, bytes that keeping it holds, those of the latent alone)."""
    x, w_down, size = value(op.args[0]), value(op.args[1]), op.args[7]
    of_one = rows(x) * x.element_size()
    seconds = 2 * rows(x) * hint(x.shape[-1]) * hint(size) / rates.flops
    return seconds, int(of_one * hint(w_down.shape[0])), int(of_one * hint(size))


def as_partitioned(forward: Sequence[Node], halves: tuple[GraphModule, GraphModule], outputs: int) -> Plan:
    """The plan that torch's partitioner carried out. forward: nodes of the joint graph; outputs: how many of the
    forward's results are the model's own."""
    first, second = (half.graph for half in halves)
    results: Any = first.output_node().args[0]
    return _with_backward(forward, [n for n in results[outputs:] if isinstance(n, Node)], second)


def plan_of_backward(forward: Sequence[Node], inputs: Sequence[Node], backward: fx.Graph) -> Plan:
    """The plan that torch's partitioner carries out once it has made the `backward` that takes `inputs`, nodes of the
    joint graph it divides: it saves of them what is read. forward: nodes of the same graph, or of one that this is a
    copy of."""
    taken = zip(inputs, backward.find_nodes(op="placeholder"), strict=True)
    return _with_backward(forward, [n for n, inside in taken if _is_read(inside)], backward)


def _is_read(node: Node) -> bool:
    """As the partitioner has it: a collective that is no more than waited for is not."""
    return any(name_of(u) != "_c10d_functional::wait_tensor" or u.users for u in node.users)


def _with_backward(forward: Sequence[Node], handed_over: Sequence[Node], backward: fx.Graph) -> Plan:
    own = {n.name for n in forward}
    # A view that the joint graph makes for backward alone, and the partitioner in the forward, holds what it is one of.
    kept = {
        n.name if n.name in own else base_of(n, through_items=False).name for n in handed_over if n.op != "placeholder"
    }
    again = {n.name for n in backward.nodes if n.op == "call_function"}
    saved = [n for n in forward if n.name in kept]
    return Plan(saved, [n for n in forward if n.name in again and n.name not in kept], [])


def read_by_backward(needed: Sequence[Node]) -> int:
    """Bytes of the forward's values that backward reads, each counted once."""
    return sum(nbytes(n.meta.get("val")) for n in dict.fromkeys(base_of(n, through_items=False) for n in needed))
