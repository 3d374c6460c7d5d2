"""The memory of a training step at its peak, predicted from the joint graph: who is alive when.

The forward runs as traced and the backward as torch's partitioner orders it under a plan: what is computed again, just
before it is first read. What Inductor fuses takes no memory: a pointwise value is written out where a product, a core
or another kernel reads it, where it outlives its graph, or where too much is read to compute it at each of its readers;
else its readers read what it is made of. A kernel writes over an operand of the same size that nobody reads later.
Counted are bytes of tensors made in the step, as the caching allocator rounds them; not its gaps, and no workspaces.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.remat.fusion import Memory, fuse
from megacpp_compile.remat.joint_graph import backward_nodes, joint
from megacpp_compile.remat.nodes import base_of, beyond_views, is_core, is_gemm, is_view, name_of, nbytes

if TYPE_CHECKING:
    from megacpp_compile.config.checkpointing import CheckpointingPolicy
    from megacpp_compile.remat.planner import Plan

# A limit is to be met though the prediction may be off by this much.
MARGIN = 1.05
# What the caching allocator rounds to.
_BLOCK = 512
# Inductor's `realize_reads_threshold` and `realize_acc_reads_threshold`: what reads more is written out where it has
# several readers; and in any case.
_READS_OF_MANY, _READS = 4, 8
_REDUCTIONS = {
    f"aten::{name}"
    for name in ("sum", "mean", "amax", "amin", "var_mean", "prod", "any", "all", "cumsum", "_softmax", "_log_softmax",
                 "argmax", "argmin", "logsumexp")
}  # fmt: skip
_KERNELS = {
    f"aten::{name}"
    for name in ("topk", "sort", "argsort", "multinomial", "nonzero", "embedding_dense_backward", "index_put",
                 "scatter", "scatter_add", "scatter_reduce", "convolution_backward", "convolution")
}  # fmt: skip
# Kernels of this package that write where they read.
_IN_PLACE = ("megacpp::mla_rope_q", "megacpp::rope_qk")


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of a step beyond what was allocated before it. `forward`, `backward`: at their peaks; `saved`: between the
    two, the `outputs` included; `gradients`: what backward hands back."""

    forward: int
    backward: int
    saved: int
    gradients: int
    outputs: int = 0

    def of(self, copies: int = 1, passed_on: bool = False) -> int:
        """The peak where `copies` such graphs run one after the other, and their backwards in turn. Each has its own
        peak with what the forwards before it keep, or with the gradients of the backwards behind it. passed_on: the
        output of one, which is the input of the next, waits elsewhere."""
        waiting = self.saved - (self.outputs if passed_on else 0)
        return max(self.forward, self.backward) + (copies - 1) * max(waiting, self.gradients)


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What a graph shares its device with. `copies`: how many graphs like it run in a step, itself included;
    `given`: bytes allocated when it was compiled, 0 where nothing counts them; `inputs`: which of its `of` inputs are
    activations, by position."""

    copies: int = 1
    given: int = 0
    inputs: tuple[int, ...] = ()
    of: int = 0

    def activations(self, graph: fx.Graph) -> list[Node]:
        """The graph's inputs that are activations; none where they cannot be told from parameters."""
        late = backward_nodes(graph)
        holders = [n for n in graph.nodes if n.op == "placeholder" and n not in late]
        return [holders[i] for i in self.inputs] if len(holders) == self.of else []

    def passed_on(self, graph: fx.Graph, policy: CheckpointingPolicy) -> list[Node]:
        """Inputs that wait in main memory: what came from a block like this one, where blocks are graphs."""
        return self.activations(graph) if self.copies > 1 and policy.offload != "none" else []

    def before(self, graph: fx.Graph) -> int:
        """Bytes allocated before a step, at least what the graphs read that none of them makes."""
        late = backward_nodes(graph)
        holders = {n for n in graph.nodes if n.op == "placeholder" and n not in late}
        passed = set(self.activations(graph))
        own = sum(rounded(n.meta.get("val")) for n in holders - passed)
        return max(self.given, self.copies * own + sum(rounded(n.meta.get("val")) for n in passed))


ALONE = StepContext()


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
        """elsewhere: saved values that wait in another memory, and come back when backward first reads them."""
        kept = [*plan.saved, *(n for n in plan.free if n in self.read)]  # what is left to torch may yet be less
        first = _Sequence(self.forward, {}, [*kept, *self.outputs], self)
        out_of_device = {b for n in elsewhere for b in first.memory(n)}
        between = {b: size for n in (*kept, *self.outputs) for b, size in first.sizes_of(n) if b not in out_of_device}
        between |= {b: size for n in self.outputs for b, size in first.sizes_of(n)}
        order = list(_as_autograd(self.backward, plan.recomputed))
        known = {n: first.memory(n) for n in (*kept, *self.outputs)}
        second = _Sequence(order, known, self.gradients, self)
        tangents = sum(rounded(n.meta.get("val")) for n in self.given)
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
    """Nodes as they run, and which memory each reads. known: the memory of values made before."""

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
        """What is alive while `node` is."""
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
        """Bytes at the peak, where `began` is alive before, and `lasting` is not freed."""
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
            # What only the kernel itself reads is never written out.
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
        """Bytes of operands, read by one node each, that results are written over."""
        if self.live.kinds[group[0]] == "kernel":
            return 0
        total = 0
        for size in new.values():
            if size in free:
                free.remove(size)
                total += size
        return total


def _as_autograd(backward: Sequence[Node], again: Sequence[Node]) -> Iterator[Node]:
    """Backward nodes, each behind what is computed again for it."""
    position = {n: i for i, n in enumerate(again)}
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
    name = name_of(node)
    if name in _IN_PLACE:
        return "in place"
    if is_gemm(node) or is_core(node) or name in _KERNELS or name.partition("::")[0] not in ("aten", "prims"):
        return "kernel"
    if "scaled_dot_product" in name:
        return "kernel"
    return "reduction" if name in _REDUCTIONS else "pointwise"


def _pieces(node: Node, held: Any = None, path: tuple[int, ...] = ()) -> Iterator[tuple[Memory, int]]:
    """The tensors that a node makes, and their bytes; a structured result has several."""
    held = node.meta.get("val") if held is None else held
    if isinstance(held, (tuple, list)):
        for i, part in enumerate(held):
            if part is not None:
                yield from _pieces(node, part, (*path, i))
    else:
        yield (node, path), rounded(held)


def _source(node: Node) -> tuple[Node, tuple[int, ...]]:
    """The operation that `node` is a part of the result of, and which."""
    path: tuple[int, ...] = ()
    while node.target is operator.getitem:
        path = (int(node.args[1]), *path)  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node, path


def rounded(value: Any) -> int:
    """Bytes that the allocator gives out for `value`."""
    return -(-nbytes(value) // _BLOCK) * _BLOCK if isinstance(value, torch.Tensor) else nbytes(value)
