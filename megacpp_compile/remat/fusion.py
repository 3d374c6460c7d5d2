"""Predicts which nodes Inductor runs as one kernel, whose results are allocated together.

Pointwise nodes and reductions over equally many elements that read or write the same memory are fused, unless a third
kernel depends on one and the other depends on it. A kernel runs in the place of its first node, behind its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.sizes import nbytes
from megacpp_compile.fx.walks import reached
from megacpp_compile.lowerings._traits import FUSIBLE

# How many kernels back a node may join. Inductor looks farther back, and finds less there.
_WINDOW = 32
# How many kernels are looked at for a dependency.
_SOUGHT = 256

# A tensor: the node that made it, and its path in the node's result.
Memory = tuple[Node, tuple[int, ...]]


def fuse(run: Sequence[Node], reads: Mapping[Node, Iterable[Memory]], kinds: Mapping[Node, str]) -> list[list[Node]]:
    """The nodes of `run` kernel by kernel, in the order they run.

    run: in graph order, without views; reads: the tensors that each node reads; kinds: `OpTraits.kernel` of each; only
    those of `FUSIBLE` are fused.
    """
    of: dict[Node, int] = {}
    groups: list[list[Node]] = []
    touched: list[set[Memory]] = []
    sizes: list[object] = []
    needs: list[set[int]] = []
    for node in run:
        operands = set(reads[node])
        sources = {of[p[0]] for p in operands if p[0] in of}
        size = _extent(node) if kinds[node] in FUSIBLE else None
        best, shared = None, 0
        if size is not None:
            for i in range(max(0, len(groups) - _WINDOW), len(groups)):
                if sizes[i] == size:
                    common = sum(_bytes(p) for p in operands & touched[i])
                    if common > shared and not _between(i, sources, needs):
                        best, shared = i, common
        if best is None:
            best = len(groups)
            groups.append([])
            touched.append(set())
            sizes.append(size)
            needs.append(set())
        of[node] = best
        groups[best].append(node)
        touched[best] |= operands | {(node, ())}
        needs[best] |= sources - {best}
    return [groups[i] for i in _sorted(needs)]


def fuse_into(
    groups: Sequence[Sequence[Node]], run: Sequence[Node], reads: Mapping[Node, Iterable[Memory]],
    kinds: Mapping[Node, str],
) -> list[list[Node]]:  # fmt: skip
    """The kernels of `run` where those of its nodes that are in `groups` stay in the kernels they have there, so that
    what is computed beside them never makes two of those one. In no order.

    Of its other nodes, a pointwise one joins the kernel with which it shares most memory; any other is a kernel.
    """
    place = {n: i for i, n in enumerate(run)}
    found = [here for group in groups if (here := [n for n in group if n in place])]
    of = {n: i for i, group in enumerate(found) for n in group}
    more = [n for n in run if n not in of]
    for node in more:
        of[node] = len(found)
        found.append([node])
    needs = [{of[p[0]] for n in group for p in reads[n] if p[0] in of} - {i} for i, group in enumerate(found)]
    latest = [max(place[n] for n in group) for group in found]
    touching: dict[Memory, set[int]] = {}
    for node in run:
        for piece in (*reads[node], (node, ())):
            touching.setdefault(piece, set()).add(of[node])
    for node in more:
        if kinds[node] != "pointwise":
            continue
        own, size, shared = of[node], _extent(node), dict[int, int]()
        for piece in (*reads[node], (node, ())):
            for i in touching[piece] - {own}:
                fused = kinds[found[i][0]] in FUSIBLE if found[i] else False
                if fused and _extent(found[i][0]) == size:
                    shared[i] = shared.get(i, 0) + _bytes(piece)
        for i in sorted(shared, key=lambda i: -shared[i]):
            if not (_reaches(own, i, needs, latest, place[node]) or _reaches(i, own, needs, latest, place[node])):
                _merge(own, i, found, needs, touching)
                latest[i] = max(latest[i], latest[own])
                of[node] = i
                break
    return [group for group in found if group]


def _reaches(start: int, end: int, needs: Sequence[set[int]], latest: Sequence[int], first: int) -> bool:
    """Whether the kernel `start` depends on `end` through a third one. first: the place of the first of the nodes that
    are to be one kernel: what runs before it does not depend on it. Where that is far to seek, it is taken to."""
    todo, seen = [i for i in needs[start] if i != end], {start}
    while todo and len(seen) < _SOUGHT:
        i = todo.pop()
        if i == end:
            return True
        if i not in seen and latest[i] >= first:
            seen.add(i)
            todo += needs[i]
    return bool(todo)


def _merge(
    gone: int, into: int, groups: Sequence[list[Node]], needs: Sequence[set[int]], touching: Mapping[Memory, set[int]]
) -> None:  # fmt: skip
    groups[into] += groups[gone]
    groups[gone].clear()
    needs[into].update(needs[gone])
    for of_group in needs:
        if gone in of_group:
            of_group.remove(gone)
            of_group.add(into)
    needs[into].discard(into)
    for near in touching.values():
        if gone in near:
            near.remove(gone)
            near.add(into)


def _extent(node: Node) -> object:
    """What the nodes of a kernel have in common: how many elements they go over, and whether they sum over columns."""
    held = [node.meta.get("val"), *(a.meta.get("val") for a in node.all_input_nodes)]
    count = max((nbytes(v) // v.element_size() for v in held if isinstance(v, torch.Tensor)), default=0)
    dims: Any = node.args[1] if len(node.args) > 1 else None
    first = held[1] if len(held) > 1 else None
    if isinstance(dims, (list, tuple)) and isinstance(first, torch.Tensor) and "dim" in str(node.target):
        if not any(isinstance(d, int) and d % max(first.dim(), 1) == first.dim() - 1 for d in dims):
            return count, "columns"
    return count, ""


def _bytes(piece: Memory) -> int:
    held: Any = piece[0].meta.get("val")
    for i in piece[1]:
        held = held[i]
    return nbytes(held)


def _between(group: int, sources: set[int], needs: Sequence[set[int]]) -> bool:
    """Whether one of the kernels `sources` other than `group` depends on `group`."""
    return group in reached(sources - {group}, needs.__getitem__)


def _sorted(needs: Sequence[set[int]]) -> list[int]:
    """Kernels by their first node, each behind those it depends on."""
    done: dict[int, None] = {}
    for start in range(len(needs)):
        stack = [start]
        while stack:
            i = stack[-1]
            missing = [] if i in done else sorted((n for n in needs[i] if n not in done), reverse=True)
            if missing:
                stack += missing
            else:
                done[stack.pop()] = None
    return list(done)
