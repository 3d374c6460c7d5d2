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

# How many kernels back a node may join. Inductor looks farther back, and finds less there.
_WINDOW = 32

# A tensor: the node that made it, and its path in the node's result.
Memory = tuple[Node, tuple[int, ...]]


def fuse(run: Sequence[Node], reads: Mapping[Node, Iterable[Memory]], kinds: Mapping[Node, str]) -> list[list[Node]]:
    """The nodes of `run` kernel by kernel, in the order they run.

    run: in graph order, without views; reads: the tensors that each node reads; kinds: `OpTraits.kernel` of each; only
    "pointwise" and "reduction" are fused.
    """
    of: dict[Node, int] = {}
    groups: list[list[Node]] = []
    touched: list[set[Memory]] = []
    sizes: list[object] = []
    needs: list[set[int]] = []
    for node in run:
        operands = set(reads[node])
        sources = {of[p[0]] for p in operands if p[0] in of}
        size = _extent(node) if kinds[node] in ("pointwise", "reduction") else None
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
    todo, seen = [s for s in sources if s != group], set[int]()
    while todo:
        i = todo.pop()
        if i == group:
            return True
        if i not in seen:
            seen.add(i)
            todo += needs[i]
    return False


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
