"""Predicts the time of a training step under a plan, for plans of one graph to be compared by.

A roofline, kernel by kernel: a GEMM, a core or another kernel of its own takes the longer of its FLOPs and its bytes;
pointwise nodes and reductions that Inductor fuses read what the kernel reads once and write what others read of it, as
`liveness.py` and `fusion.py` have it, the graph's inputs included. So a value that a kernel of backward computes anyway
while it reads its operands costs nothing there, and one that a GEMM reads costs its writing. Every kernel takes a
launch beside that: what is recomputed by one more is never free, however small. Rates come from a table
(`targets.rates`), never from the machine: every rank predicts the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.sizes import elements, hint, nbytes
from megacpp_compile.lowerings._traits import name_of, traits_of
from megacpp_compile.remat import costs
from megacpp_compile.remat.fusion import Memory, fuse_into
from megacpp_compile.remat.liveness import Facts, Run
from megacpp_compile.remat.peak import PeakModel
from megacpp_compile.remat.plan import Plan
from megacpp_compile.targets.rates import Rates

# Attention's backward multiplies five times where its forward does twice, that of a product twice where it does once.
_BACKWARD_OF_ATTENTION, _BACKWARD_OF_PRODUCT = 2.5, 2.0


class StepTime:
    """The predicted seconds of forward and backward of the joint graph of `model` under plans.

    Under each, what `begin` runs stays in the kernels it has there: no plan is the cheaper for kernels that only its
    own recomputation would have Inductor fuse. One of them that reduces and has to read more than under `begin` counts
    twice what it reads: Inductor then makes several of it, as of a norm's backward that sums over rows and columns.
    """

    def __init__(self, model: PeakModel, begin: Plan, rates: Rates) -> None:
        self.model, self.rates, self.of_forward = model, rates, _of_forward(model.forward)
        self.kernels: list[list[list[Node]]] = []
        # Of each node of a kernel under `begin`, the bytes that the kernel reads.
        self.read: dict[Node, int] = {}
        # The seconds of each kernel of its own, whatever the plan.
        kinds = model.facts.kinds
        own = (n for n in kinds if kinds[n] in ("kernel", "in place"))
        self.alone = {n: max(flops(n, self.of_forward) / rates.flops, costs.moved(n) / rates.bytes) for n in own}
        for run in model.runs(begin):
            groups, reads = run.kernels()
            self.kernels.append(groups)
            given = _given(run, model.facts)
            for group in groups:
                self.read |= dict.fromkeys(group, _read(group, reads, given, model.facts))

    def __call__(self, plan: Plan) -> float:
        return sum(map(self._seconds, self.model.runs(plan), self.kernels))

    def _seconds(self, run: Run, kernels: Sequence[Sequence[Node]]) -> float:
        """Of the kernels of `run`. kernels: those that stay as they are."""
        facts, rates = self.model.facts, self.rates
        nodes, reads = run.executed()
        groups, given = fuse_into(kernels, nodes, reads, facts.kinds), _given(run, facts)
        stays = {p for n in run.lasting for p in run.memory(n)}
        place = {n: i for i, group in enumerate(groups) for n in group}
        readers = by_key((piece, place[node]) for node, pieces in reads.items() for piece in pieces)
        seconds = len(groups) * rates.launch
        for i, group in enumerate(groups):
            node = group[0]
            if node in self.alone:
                seconds += self.alone[node]
                continue
            read = _read(group, reads, given, facts)
            if read > self.read.get(node, read) and any(facts.kinds[n] == "reduction" for n in group):
                read *= 2
            own = (p for n in group for p in facts.pieces[n])
            written = sum(_size(facts, p) for p in own if p in stays or {*readers.get(p, ())} - {i})
            seconds += (read + written) / rates.bytes
        return seconds


def _of_forward(forward: Sequence[Node]) -> dict[str, float]:
    """The FLOPs of ops of ours by name, the mean of all their sites."""
    found = by_key((name_of(node), flops(node)) for node in forward if traits_of(node).flops is not None)
    return {name: sum(each) / len(each) for name, each in found.items()}


def _read(
    group: Sequence[Node], reads: Mapping[Node, Iterable[Memory]], given: Mapping[Node, Mapping[Node, int]],
    facts: Facts,
) -> int:  # fmt: skip
    """Bytes that a kernel reads. reads: the tensors that each node reads; given: of `_given`."""
    own = {p for n in group for p in facts.pieces[n]}
    of_inputs: dict[Node, int] = {}
    for node in group:
        for source, size in given[node].items():
            of_inputs[source] = max(of_inputs.get(source, 0), size)
    return sum(_size(facts, p) for p in {p for n in group for p in reads[n]} - own) + sum(of_inputs.values())


def _given(run: Run, facts: Facts) -> dict[Node, dict[Node, int]]:
    """The bytes that each node of `run` reads of the graph's inputs, also through views and values that it inlines. A
    pointwise node reads an element for each of its own at most, as one that gathers rows of a table."""
    found: dict[Node, dict[Node, int]] = {}
    for node in run.order:
        own: dict[Node, int] = {}
        made = node.meta.get("val")
        inline = facts.kinds[node] == "pointwise" and isinstance(made, torch.Tensor)
        most = elements(made) if inline else None
        for a in facts.inputs[node]:
            if a.op == "placeholder":
                held = a.meta.get("val")
                all_of, each = nbytes(held), held.element_size() if isinstance(held, torch.Tensor) else 0
                own[a] = all_of if most is None else min(all_of, most * each)
            elif a in run.virtual or facts.kinds.get(a) == "view":
                for source, size in found.get(a, {}).items():
                    own[source] = max(own.get(source, 0), size)
        found[node] = own
    return found


def _size(facts: Facts, piece: tuple[Node, tuple[int, ...]]) -> int:
    return facts.pieces[piece[0]][piece]


def flops(node: Node, of_forward: Mapping[str, float] = MappingProxyType({})) -> float:
    """`costs.flops`; of attention cores that torch has no formula for, such as the CPU's, what their shapes say; of a
    backward op of ours, as many times those of its forward (`of_forward`, by name) as its kind has."""
    found = costs.flops(node)
    if found or traits_of(node).core:
        return found or _of_attention(node)
    forward = name_of(node).removesuffix("_backward")
    if forward == name_of(node) or forward not in of_forward:
        return 0.0
    core = traits_of(forward).core
    return of_forward[forward] * (_BACKWARD_OF_ATTENTION if core else _BACKWARD_OF_PRODUCT)


def _of_attention(node: Node) -> float:
    if "attention" not in name_of(node):
        return 0.0
    backward = "backward" in name_of(node)
    operands: Sequence[torch.Tensor] = [value(a) for a in node.args if isinstance(a, Node)]
    q, k, v = operands[1:4] if backward else operands[:3]
    each = 2 * hint(q.shape[-2]) * hint(k.shape[-2]) * (hint(q.shape[-1]) + hint(v.shape[-1]))
    heads = nbytes(q) // q.element_size() // max(hint(q.shape[-2]) * hint(q.shape[-1]), 1)
    return heads * each * (_BACKWARD_OF_ATTENTION if backward else 1.0)
