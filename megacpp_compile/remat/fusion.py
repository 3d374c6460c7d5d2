"""Which nodes Inductor will run as one kernel, as far as memory goes: all results of a kernel are there at once.

Pointwise nodes and reductions that go over as many elements and read, or write, the same memory are fused, if nothing
lies between them that needs one and is needed by the other. A kernel runs where the first of its nodes stood, behind
what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.remat.nodes import nbytes

# How many kernels back one is looked for to join. Inductor looks farther, and finds less there.
_WINDOW = 32

# The node that made a tensor, and where in its result that is.
Memory = tuple[Node, tuple[int, ...]]


def fuse(run: Sequence[Node], reads: Mapping[Node, Iterable[Memory]], kinds: Mapping[Node, str]) -> list[list[Node]]:
    """Nodes, kernel by kernel, in the order they run. reads: the memory each reads; kinds: "kernel" for what runs by
    itself, "pointwise" and "reduction" for what may be fused."""
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
    """What two nodes must have in common to be one kernel: the elements they go over, and along what they sum."""
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
    """Whether one of `sources` other than `group` needs `group`."""
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
    """Groups by their first node, each behind what it needs."""
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
