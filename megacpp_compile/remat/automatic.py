"""`policy="auto"`: a plan for a frame by predicted time and memory, beside what torch's partitioner makes of it.

The rule. Let T be the predicted time of a step as torch's partitioner has it (`policy="none"`).

- A latent is kept where its down-projection takes longer than writing and reading it: recomputing it would free fewer
  bytes a second than the memory moves. Only the width of the input matters: above 370 channels on sm_90 in bfloat16.
- Of what the partitioner saves and "selective" would recompute, values are given up in the order of predicted seconds
  per byte freed, equal values of all layers one after the other, as long as recomputing takes at most 0.005 T: what is
  free, as far as such a prediction tells. `policy={"auto": 0.02}` allows 0.02 T. What kept latents save is not spent.
- That plan is taken where it saves fewer bytes than the partitioner and lowers the predicted peak of the step by at
  least 2 %. So a block by itself is left to the partitioner: its backward reads at once what its forward has saved.

Little is free. A value that a GEMM or another kernel of its own reads in forward is written there anyway, so that
saving it costs no time; recomputing it for such a kernel in backward reads what it is made from and writes it once
more. Free is what a fused kernel of backward computes from what it reads in any case.

All of it is a function of the graph and of a table of rates: every rank that has the same graph makes the same plan.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from megacpp_compile.config.checkpointing import CheckpointingPolicy
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.provenance import module_fqn
from megacpp_compile.fx.sizes import hint, nbytes, rows
from megacpp_compile.fx.view_chains import base_of
from megacpp_compile.fx.views import is_view
from megacpp_compile.lowerings._traits import FUSIBLE, name_of, traits_of
from megacpp_compile.remat.closure import settle
from megacpp_compile.remat.decisions import SaveDecisions
from megacpp_compile.remat.latents import may_hand_over
from megacpp_compile.remat.plan import RECOMPUTE, SAVE, BlockRef, Plan, kept_bytes
from megacpp_compile.remat.solver import likeness, made_by
from megacpp_compile.targets.rates import Rates

# What of its predicted peak a plan has to spare.
LEAST_SPARED = 0.02
# Bytes that backward reads of the forward, from which a frame is planned: below, there is nothing to spare.
LEAST_READ = 32 << 20

# What may be recomputed.
SELECTIVE = CheckpointingPolicy(depth_loop="kinds")

# What is given up together: like values of every layer.
Likes = frozenset[tuple[object, ...]]


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

    A step gives up what is alike in one layer. Likes are in the order of their price: the seconds of a step more for
    each byte that giving them up in one layer frees.

    forward, needed, blocks: as of `make_plan`. none: what the partitioner saves and recomputes of `forward`. seconds:
    of a step under a plan.
    """

    def __init__(
        self,
        forward: Sequence[Node],
        needed: Sequence[Node],
        blocks: Mapping[Node, BlockRef],
        none: Plan,
        seconds: Callable[[Plan], float],
    ) -> None:
        self.forward, self.needed, self.blocks, self.seconds = forward, needed, blocks, seconds
        self.cheap = SaveDecisions(forward, blocks, SELECTIVE).of
        saved = [n for n in none.saved if base_of(n).op != "placeholder"]  # a view of an input holds nothing
        self.none = {**self.cheap, **dict.fromkeys(saved, SAVE), **dict.fromkeys(none.recomputed, RECOMPUTE)}
        self.begin = settle(forward, needed, self.none)
        # Like values by layer.
        self.alike: dict[tuple[object, ...], dict[str, list[Node]]] = {}
        for node in self.begin.saved:
            if self.cheap[node] == RECOMPUTE and kept_bytes(node):
                layers = self.alike.setdefault(likeness(made_by(node)), {})
                layers.setdefault(blocks[node].layer, []).append(node)
        at_begin = seconds(self.begin)
        price = {likes: self._price(likes, at_begin) for likes in self._together()}
        finite = (likes for likes in price if price[likes] < math.inf)
        self.prices = {likes: price[likes] for likes in sorted(finite, key=price.__getitem__)}
        self.given_up = [nodes for likes in self.prices for nodes in self._by_layer(likes)]
        self.steps = len(self.given_up)

    def plan(self, steps: int) -> Plan:
        """The plan `steps` up."""
        return self._without([n for nodes in self.given_up[:steps] for n in nodes])

    def selective(self) -> Plan:
        """What "selective" makes of the graph."""
        return settle(self.forward, self.needed, self.cheap)

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

    def given_up_by(self, plan: Plan) -> dict[str, int]:
        """The bytes that `plan` does not save of what torch's partitioner does, by op and module, the most first."""
        kept, found = set(plan.saved), dict[str, int]()
        for node in self.begin.saved:
            if node not in kept and (size := kept_bytes(node)):
                module = re.sub(r"(^|.*\.)\d+\.", "", module_fqn(node))
                name = name_of(made_by(base_of(node))).rpartition("::")[2]
                place = f"{name} in {module}" if module else name
                found[place] = found.get(place, 0) + size
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _without(self, given_up: Iterable[Node]) -> Plan:
        return settle(self.forward, self.needed, {**self.none, **dict.fromkeys(given_up, RECOMPUTE)})

    def _by_layer(self, likes: Likes) -> list[list[Node]]:
        """What is alike, layer by layer in the order they run."""
        layers = dict.fromkeys(self.blocks[n].layer for n in self.forward)
        found = [[n for like in likes for n in self.alike[like].get(layer, ())] for layer in layers]
        return [nodes for nodes in found if nodes]

    def _of_one_layer(self, likes: Likes) -> list[Node]:
        """What is alike in one of the layers in the middle that have most of it."""
        by_layer = self._by_layer(likes)
        most = max(map(len, by_layer))
        full = [nodes for nodes in by_layer if len(nodes) == most]
        return full[len(full) // 2]

    def _together(self) -> list[Likes]:
        """The likes that are given up together: recomputing them takes the same further saved value, or runs the same
        kernel of its own again."""
        found: list[tuple[Likes, set[Node]]] = []
        saved, recomputed = set(self.begin.saved), set(self.begin.recomputed)
        for like in self.alike:
            trial = self._without(self._of_one_layer(frozenset({like})))
            shared = {n for n in trial.saved if n not in saved}
            shared |= {n for n in trial.recomputed if n not in recomputed and not _fuses(n)}
            same = [each for each in found if each[1] & shared]
            found = [each for each in found if each not in same]
            found.append((frozenset({like}).union(*(s[0] for s in same)), shared.union(*(s[1] for s in same))))
        return [likes for likes, _ in found]

    def _price(self, likes: Likes, at_begin: float) -> float:
        """Seconds for each byte freed; infinite where giving them up frees nothing. at_begin: those of no step."""
        trial = self._without(self._of_one_layer(likes))
        freed = self.begin.saved_bytes() - trial.saved_bytes()
        return (self.seconds(trial) - at_begin) / freed if freed > 0 else math.inf


def _fuses(node: Node) -> bool:
    return is_view(node) or node.target is operator.getitem or traits_of(node).kernel in FUSIBLE


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
