"""Predicts the peak memory of a training step from the joint graph, by liveness.

The forward runs as traced, the backward as torch's partitioner orders it under a plan: a value is recomputed just
before its first reader. A pointwise value that Inductor inlines into its readers takes no memory, and its readers read
what it is computed from; it is written out where a GEMM, a core or another kernel reads it, where it outlives its
graph, or where computing it at each of its readers would read too much. A fused kernel writes over an operand of the
same size that nobody reads later. The prediction counts bytes of tensors allocated in the step, as the caching
allocator rounds them, without its fragmentation and without workspaces.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import fx
from torch.fx import Node

from megacpp_compile.fx.view_chains import base_of, beyond_views, is_view
from megacpp_compile.lowerings._traits import traits_of
from megacpp_compile.remat.fusion import Memory, fuse
from megacpp_compile.remat.joint_graph import backward_nodes, joint
from megacpp_compile.remat.plan import Plan, allocated_bytes

# A limit is kept even where the prediction is too low by this factor.
MARGIN = 1.05
# Inductor's `realize_reads_threshold` and `realize_acc_reads_threshold`: a value that reads more tensors is written out
# if it has several readers (the first), or in any case (the second).
_READS_OF_MANY, _READS = 4, 8


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of a step beyond what was allocated before it.

    Attributes:
        forward, backward: at their peaks.
        saved: between the two, the outputs included.
        gradients: what backward returns.
        outputs: what the forward returns to the model.
    """

    forward: int
    backward: int
    saved: int
    gradients: int
    outputs: int = 0

    def of(self, copies: int = 1, passed_on: bool = False) -> int:
        """Bytes at the peak of `copies` such graphs, whose forwards run one after the other and then their backwards.

        Beside the peak of one there is what the forwards before it save, or the gradients of the backwards that ran.
        passed_on: the output of one, which is the input of the next, is offloaded.
        """
        waiting = self.saved - (self.outputs if passed_on else 0)
        return max(self.forward, self.backward) + (copies - 1) * max(waiting, self.gradients)


class Liveness:
    """Predicts the peak of a joint graph under one plan after another."""

    def __init__(self, graph: fx.Graph) -> None:
        self.forward, needed = joint(graph)
        self.read = set(needed)
        self.inner = set(self.forward)
        late = backward_nodes(graph)
        self.backward = [n for n in graph.nodes if n in late and n.op == "call_function"]
        outputs = graph.output_node().all_input_nodes
        self.outputs = [a for a in outputs if a in self.inner]
        self.gradients = [a for a in outputs if a in late and a.op == "call_function"]
        self.given = [n for n in graph.nodes if n.op == "placeholder" and n in late]
        self.kinds: dict[Node, str] = {n: _kind(n) for n in (*self.forward, *self.backward)}
        self.readers = {n: list(beyond_views(n, through_items=False)) for n in self.kinds}
        self.pieces = {n: dict(_pieces(n)) for n, kind in self.kinds.items() if kind != "view"}
        self.inputs = {n: n.all_input_nodes for n in self.kinds}

    def __call__(self, plan: Plan, elsewhere: Set[Node] = frozenset()) -> Peak:
        """The peak under `plan`. elsewhere: saved values that are offloaded until backward first reads them."""
        kept = [*plan.saved, *(n for n in plan.free if n in self.read)]  # torch's partitioner may save less of `free`
        first = _Sequence(self.forward, {}, [*kept, *self.outputs], self)
        out_of_device = {b for n in elsewhere for b in first.memory(n)}
        between = {b: size for n in (*kept, *self.outputs) for b, size in first.sizes_of(n) if b not in out_of_device}
        between |= {b: size for n in self.outputs for b, size in first.sizes_of(n)}
        order = list(_as_autograd(self.backward, plan.recomputed))
        known = {n: first.memory(n) for n in (*kept, *self.outputs)}
        second = _Sequence(order, known, self.gradients, self)
        tangents = sum(allocated_bytes(n.meta.get("val")) for n in self.given)
        outputs = {b for n in self.outputs for b in first.memory(n)}
        returning = {b: size for n in elsewhere for b, size in first.sizes_of(n)}
        began = dict(between)
        gradients = sum({b: size for n in self.gradients for b, size in second.sizes_of(n)}.values())
        return Peak(
            forward=first.peak({}, frozenset(between), {}),
            backward=second.peak(began, outputs, returning) + tangents,
            saved=sum(between.values()),
            gradients=gradients,
            outputs=sum({b: size for n in self.outputs for b, size in first.sizes_of(n)}.values()),
        )




class _Sequence:
    """Nodes in the order they run, and the memory that each reads. known: the memory of values from before."""

    def __init__(
        self, order: Sequence[Node], known: Mapping[Node, Iterable[Memory]], lasting: Iterable[Node], live: Liveness
    ) -> None:
        self.order, self.live = order, live
        self.reads: dict[Node, dict[Memory, None]] = {n: dict.fromkeys(m) for n, m in known.items()}
        self.made = set(order)
        self.lasting = {base_of(n, through_items=False) for n in lasting}
        self.virtual: set[Node] = set()
        for node in order:
            self.reads[node] = self._memory_of(node)

    def memory(self, node: Node) -> dict[Memory, None]:
        """The tensors that are alive while `node` is."""
        return self.reads.get(node, {})

    def sizes_of(self, node: Node) -> Iterator[tuple[Memory, int]]:
        for piece in self.memory(node):
            yield piece, self.live.pieces[piece[0]][piece]

    def _memory_of(self, node: Node) -> dict[Memory, None]:
        if node.target is operator.getitem and not is_view(_source(node)[0]):
            op, path = _source(node)
            return {p: None for p in self.live.pieces[op] if p[1][: len(path)] == path}
        read = {piece: None for a in self.live.inputs[node] for piece in self.reads.get(a, {})}
        if self.live.kinds[node] == "view":
            return read
        if self.live.kinds[node] == "pointwise" and node not in self.lasting and self._inlined(node, len(read)):
            self.virtual.add(node)
            return read
        return dict.fromkeys(self.live.pieces[node])

    def _inlined(self, node: Node, reads: int) -> bool:
        readers = [u for u in self.live.readers[node] if u in self.made]
        several = len(readers) > 1
        if reads > (_READS_OF_MANY if several else _READS):
            return False
        return all(self.live.kinds[u] in ("pointwise", "reduction") for u in readers)

    def peak(self, began: Mapping[Memory, int], lasting: Set[Memory], returning: Mapping[Memory, int]) -> int:
        """Bytes at the peak. began: tensors that are alive before, with their bytes; lasting: tensors that are not
        freed; returning: offloaded tensors, with their bytes."""
        run = [n for n in self.order if n not in self.virtual and self.live.kinds[n] != "view"]
        reads = {n: {p: None for a in self.live.inputs[n] for p in self.reads.get(a, {})} for n in run}
        stays = set(lasting) | {p for n in self.lasting for p in self.reads.get(n, {})}
        readers: dict[Memory, list[Node]] = {}
        for node in run:
            for piece in reads[node]:
                readers.setdefault(piece, []).append(node)
        order = fuse(run, reads, self.live.kinds)
        place = {n: i for i, group in enumerate(order) for n in group}
        last = {p: max(place[n] for n in nodes) for p, nodes in readers.items()}
        alive = {p: size for p, size in began.items() if p in last or p in stays}
        now, top = sum(alive.values()), sum(began.values())
        for i, group in enumerate(order):
            operands = dict.fromkeys(p for n in group for p in reads[n])
            back = {p: returning[p] for p in operands if p in returning and p not in alive}
            # A tensor that only the kernel itself reads is never written out.
            own = {p for n in group for p in self.live.pieces[n] if last.get(p) == i and p not in stays}
            new = back | {p: size for n in group for p, size in self.live.pieces[n].items() if p not in own}
            dying = [p for p in operands if last[p] == i and p not in stays and p in alive]
            reused = self._reused(group, [alive[p] for p in dying if len(readers[p]) == 1], new)
            alive |= new
            now += sum(new.values())
            top = max(top, now - reused)
            for piece in [*dying, *back, *new]:
                if piece in alive and piece not in stays and last.get(piece, i) <= i:
                    now -= alive.pop(piece)
        return top

    def _reused(self, group: Sequence[Node], free: list[int], new: Mapping[Memory, int]) -> int:
        """Bytes of operands (`free`, each read by one node) that the kernel writes its results over."""
        if self.live.kinds[group[0]] == "kernel":
            return 0
        total = 0
        for size in new.values():
            if size in free:
                free.remove(size)
                total += size
        return total


def _as_autograd(backward: Sequence[Node], recomputed: Sequence[Node]) -> Iterator[Node]:
    """Backward nodes, and before each the nodes recomputed for it."""
    position = {n: i for i, n in enumerate(recomputed)}
    done: set[Node] = set()
    for node in backward:
        todo, found = [node], set[Node]()
        while todo:
            for a in todo.pop().all_input_nodes:
                if a in position and a not in done and a not in found:
                    found.add(a)
                    todo.append(a)
        done |= found
        yield from sorted(found, key=position.__getitem__)
        yield node


def _kind(node: Node) -> str:
    if is_view(node) or node.target is operator.getitem:
        return "view"
    return traits_of(node).kernel


def _pieces(node: Node, held: Any = None, path: tuple[int, ...] = ()) -> Iterator[tuple[Memory, int]]:
    """The tensors that a node allocates, and their bytes; several for a structured result."""
    held = node.meta.get("val") if held is None else held
    if isinstance(held, (tuple, list)):
        for i, part in enumerate(held):
            if part is not None:
                yield from _pieces(node, part, (*path, i))
    else:
        yield (node, path), allocated_bytes(held)


def _source(node: Node) -> tuple[Node, tuple[int, ...]]:
    """The op that `node` is an item of the result of, and the item's path."""
    path: tuple[int, ...] = ()
    while node.target is operator.getitem:
        path = (int(node.args[1]), *path)  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node, path
