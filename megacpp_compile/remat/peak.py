"""Predicts the peak memory of a training step from the joint graph.

The forward runs as traced, the backward as torch's partitioner orders it under a plan: a value is recomputed just
before its first reader. `liveness.py` says which tensors are alive when. The prediction counts bytes of tensors
allocated in the step, as the caching allocator rounds them, without its fragmentation and without workspaces of
libraries; ops of this package that hold much while they run say how much (`OpTraits.workspace`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import fx
from torch.fx import Node

from megacpp_compile.fx.walks import ancestors
from megacpp_compile.remat.fusion import Memory
from megacpp_compile.remat.joint_graph import backward_nodes, joint
from megacpp_compile.remat.liveness import Facts, Run
from megacpp_compile.remat.plan import Plan, allocated_bytes

# A limit is kept even where the prediction is too low by this factor.
MARGIN = 1.05


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of a step beyond what was allocated before it.

    Attributes:
        forward, backward: at their peaks.
        saved: between the two, the outputs included.
        gradients: what backward returns.
        outputs: what the forward returns to the model.
        over_time: the bytes of the forward, and of the backward, as they begin and while each kernel runs.
    """

    forward: int
    backward: int
    saved: int
    gradients: int
    outputs: int = 0
    over_time: tuple[list[int], list[int]] = dataclasses.field(default=([], []), repr=False, compare=False)

    def of(self, copies: int = 1, passed_on: bool = False) -> int:
        """Bytes at the peak of `copies` such graphs, whose forwards run one after the other and then their backwards.

        Beside the peak of one there is what the forwards before it save, or the gradients of the backwards that ran.
        passed_on: the output of one, which is the input of the next, is offloaded.
        """
        waiting = self.saved - (self.outputs if passed_on else 0)
        return max(self.forward, self.backward) + (copies - 1) * max(waiting, self.gradients)


class PeakModel:
    """Predicts the peak of a joint graph under one plan after another."""

    def __init__(self, graph: fx.Graph) -> None:
        self.forward, needed = joint(graph)
        self.read = set(needed)
        self.inner = set(self.forward)
        self.place = {n: i for i, n in enumerate(self.forward)}
        late = backward_nodes(graph)
        self.backward = [n for n in graph.nodes if n in late and n.op == "call_function"]
        outputs = graph.output_node().all_input_nodes
        self.outputs = [a for a in outputs if a in self.inner]
        self.gradients = [a for a in outputs if a in late and a.op == "call_function"]
        self.given = [n for n in graph.nodes if n.op == "placeholder" and n in late]
        self.facts = Facts([*self.forward, *self.backward])

    def __call__(self, plan: Plan, elsewhere: Mapping[Node, str] = MappingProxyType({})) -> Peak:
        """The peak under `plan`. elsewhere: saved values that are offloaded until backward needs them, with their
        layers."""
        kept = self._kept(plan)
        first, second = self.runs(plan)
        out_of_device = {b for n in elsewhere for b in first.memory(n)}
        between = {b: size for n in (*kept, *self.outputs) for b, size in first.sizes_of(n) if b not in out_of_device}
        between |= {b: size for n in self.outputs for b, size in first.sizes_of(n)}
        tangents = sum(allocated_bytes(n.meta.get("val")) for n in self.given)
        outputs = {b for n in self.outputs for b in first.memory(n)}
        returning = {b: size for n in reversed(elsewhere) for b, size in first.sizes_of(n)}
        began = dict(between)
        gradients = sum({b: size for n in self.gradients for b, size in second.sizes_of(n)}.values())
        forward = first.levels({}, frozenset(between), {}, self._leaving(first, elsewhere))
        backward = [level + tangents for level in second.levels(began, outputs, returning)]
        return Peak(
            forward=max(forward),
            backward=max(backward),
            saved=sum(between.values()),
            gradients=gradients,
            outputs=sum({b: size for n in self.outputs for b, size in first.sizes_of(n)}.values()),
            over_time=(forward, backward),
        )

    def _leaving(self, first: Run, elsewhere: Mapping[Node, str]) -> dict[Memory, Node]:
        """Until when offloaded values live: as long as their copies are made beside the rest of their layer."""
        found: dict[Memory, Node] = {}
        order = sorted(elsewhere, key=self.place.__getitem__)
        for i, node in enumerate(order):
            later = next((n for n in order[i + 1 :] if elsewhere[n] != elsewhere[node]), None)
            made = self.forward[-1] if later is None else next((op for op, _ in first.memory(later)), later)
            found |= dict.fromkeys(first.memory(node), made)
        return found

    def runs(self, plan: Plan) -> tuple[Run, Run]:
        """The forward and the backward under `plan`."""
        kept = self._kept(plan)
        first = Run(self.forward, {}, [*kept, *self.outputs], self.facts)
        known = {n: first.memory(n) for n in (*kept, *self.outputs)}
        return first, Run(list(_as_autograd(self.backward, plan.recomputed)), known, self.gradients, self.facts)

    def _kept(self, plan: Plan) -> list[Node]:
        return [*plan.saved, *(n for n in plan.free if n in self.read)]  # torch's partitioner may save less of `free`


def _as_autograd(backward: Sequence[Node], recomputed: Sequence[Node]) -> Iterator[Node]:
    """Backward nodes, and before each the nodes recomputed for it."""
    position = {n: i for i, n in enumerate(recomputed)}
    left = set(recomputed)
    for node in backward:
        found = {*ancestors([node], left.__contains__)} - {node}
        left -= found
        yield from sorted(found, key=position.__getitem__)
        yield node
