"""Which tensors are alive when, as nodes run one after the other.

A pointwise value that Inductor inlines into its readers takes no memory, and its readers read what it is computed from;
it is written out where a GEMM, a core or another kernel reads it, where it outlives its graph, or where computing it at
each of its readers would read too much. A fused kernel writes over an operand of the same size that nobody reads later.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from torch.fx import Node, map_arg

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.view_chains import base_of, beyond_views
from megacpp_compile.fx.views import is_view
from megacpp_compile.lowerings._traits import FUSIBLE, traits_of
from megacpp_compile.reader.links import chain
from megacpp_compile.remat.fusion import Memory, fuse
from megacpp_compile.remat.host_copies import fits
from megacpp_compile.remat.plan import allocated_bytes

# Inductor's `realize_reads_threshold` and `realize_acc_reads_threshold`: a value that reads more tensors is written out
# if it has several readers (the first), or in any case (the second).
_READS_OF_MANY, _READS = 4, 8


class Facts:
    """What does not depend on a plan. By node: `kinds`, how it runs ("view" or `OpTraits.kernel`); `readers`, beyond
    views; `pieces`, the tensors it allocates, with their bytes; `workspaces`, bytes it has while it runs, where many;
    `inputs`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.kinds: dict[Node, str] = {n: _kind(n) for n in nodes}
        self.readers = {n: list(beyond_views(n, through_items=False)) for n in nodes}
        self.pieces = {n: dict(_pieces(n)) for n, kind in self.kinds.items() if kind != "view"}
        self.workspaces = {n: size for n in nodes if (size := _workspace(n))}
        self.inputs = {n: n.all_input_nodes for n in nodes}


class Run:
    """Nodes in the order they run, and the memory that each reads.

    known: the memory of values from before; lasting: the nodes whose results outlive the run.
    """

    def __init__(
        self, order: Sequence[Node], known: Mapping[Node, Iterable[Memory]], lasting: Iterable[Node], facts: Facts
    ) -> None:
        self.order, self.facts = order, facts
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
            yield piece, self.facts.pieces[piece[0]][piece]

    def _memory_of(self, node: Node) -> dict[Memory, None]:
        if node.target is operator.getitem and not is_view(_source(node)[0]):
            op, path = _source(node)
            return {p: None for p in self.facts.pieces[op] if p[1][: len(path)] == path}
        read = {piece: None for a in self.facts.inputs[node] for piece in self.reads.get(a, {})}
        if self.facts.kinds[node] == "view":
            return read
        if self.facts.kinds[node] == "pointwise" and node not in self.lasting and self._inlined(node, len(read)):
            self.virtual.add(node)
            return read
        return dict.fromkeys(self.facts.pieces[node])

    def _inlined(self, node: Node, reads: int) -> bool:
        readers = [u for u in self.facts.readers[node] if u in self.made]
        several = len(readers) > 1
        if reads > (_READS_OF_MANY if several else _READS):
            return False
        return all(self.facts.kinds[u] in FUSIBLE for u in readers)

    def kernels(self) -> tuple[list[list[Node]], dict[Node, dict[Memory, None]]]:
        """(the nodes kernel by kernel, in the order they run; the tensors that each node reads)."""
        run, reads = self.executed()
        return fuse(run, reads, self.facts.kinds), reads

    def executed(self) -> tuple[list[Node], dict[Node, dict[Memory, None]]]:
        """(the nodes but for views and what is inlined, in their order; the tensors that each reads)."""
        run = [n for n in self.order if n not in self.virtual and self.facts.kinds[n] != "view"]
        return run, {n: {p: None for a in self.facts.inputs[n] for p in self.reads.get(a, {})} for n in run}

    def levels(
        self,
        began: Mapping[Memory, int],
        lasting: Set[Memory],
        returning: Mapping[Memory, int],
        until: Mapping[Memory, Node] = MappingProxyType({}),
    ) -> list[int]:
        """Bytes as the run begins, and while each of its kernels runs. began: tensors that are alive before, with their
        bytes; lasting: tensors that are not freed; returning: offloaded tensors, with their bytes, in the order in
        which they are asked for; until: the nodes up to which tensors live that are on their way off the device, if
        nothing later reads them."""
        order, reads = self.kernels()
        stays = (set(lasting) | {p for n in self.lasting for p in self.reads.get(n, {})}) - set(until)
        readers = by_key((piece, node) for node in reads for piece in reads[node])
        place = {n: i for i, group in enumerate(order) for n in group}
        last = {p: max(place[n] for n in nodes) for p, nodes in readers.items()}
        last |= {p: max(last.get(p, 0), place.get(n, len(order) - 1)) for p, n in until.items()}
        left = by_key((last[piece], piece) for piece in until)
        early = _Early({p: size for p, size in returning.items() if p in last})
        began = {**began, **early.begin()}
        alive = {p: size for p, size in began.items() if p in last or p in stays}
        now, found = sum(alive.values()), [sum(began.values())]
        for i, group in enumerate(order):
            operands = dict.fromkeys(p for n in group for p in reads[n])
            back = early.read(operands)
            # A tensor that only the kernel itself reads is never written out.
            own = {p for n in group for p in self.facts.pieces[n] if last.get(p) == i and p not in stays}
            new = back | {p: size for n in group for p, size in self.facts.pieces[n].items() if p not in own}
            dying = [p for p in operands if last[p] == i and p not in stays and p in alive]
            reused = self._reused(group, [alive[p] for p in dying if len(readers[p]) == 1], new)
            alive |= new
            now += sum(new.values())
            inside = max(self.facts.workspaces.get(n, 0) for n in group)
            found.append(now - reused + inside)
            for piece in [*dying, *back, *new, *left.get(i, ())]:
                if piece in alive and piece not in stays and last.get(piece, i) <= i:
                    now -= alive.pop(piece)
        return found

    def _reused(self, group: Sequence[Node], free: list[int], new: Mapping[Memory, int]) -> int:
        """Bytes of operands (`free`, each read by one node) that the kernel writes its results over."""
        if self.facts.kinds[group[0]] == "kernel":
            return 0
        total = 0
        for size in new.values():
            if size in free:
                free.remove(size)
                total += size
        return total


class _Early:
    """Which offloaded tensors are back when, as `host_copies.py` asks for them. waiting: those, in that order."""

    def __init__(self, waiting: Mapping[Memory, int]) -> None:
        self.waiting, self.asked = dict(waiting), dict[Memory, int]()

    def begin(self) -> dict[Memory, int]:
        """The first, which backward asks for as it begins."""
        return self._ask(list(self.waiting)[:1])

    def read(self, operands: Iterable[Memory]) -> dict[Memory, int]:
        """The tensors that come back as `operands` are read."""
        first = [p for p in operands if p in self.waiting or p in self.asked]
        back = self._ask([p for p in first if p in self.waiting])
        for piece in first:
            del self.asked[piece]
        for piece in list(self.waiting) if first else []:
            if not fits(sum(self.asked.values()), self.waiting[piece]):
                break
            back |= self._ask([piece])
        return back

    def _ask(self, pieces: Iterable[Memory]) -> dict[Memory, int]:
        found = {p: self.waiting.pop(p) for p in pieces}
        self.asked |= found
        return found


def _kind(node: Node) -> str:
    if is_view(node) or node.target is operator.getitem:
        return "view"
    return traits_of(node).kernel


def _workspace(node: Node) -> int:
    own = traits_of(node).workspace
    if own is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), value)
    return own(*args, **kwargs)


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
    *items, node = chain(node, {operator.getitem})
    return node, tuple(int(item.args[1]) for item in reversed(items))
