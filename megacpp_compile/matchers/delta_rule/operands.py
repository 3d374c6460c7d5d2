"""The operands of a core: each the value of every token, from which all that enters the core is made token by token."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Set

import torch
from torch.fx import Node

from megacpp_compile.fx.views import PARTS, SPLITS
from megacpp_compile.matchers.delta_rule.norms import Before
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, constants_of, operand_of, tensors
from megacpp_compile.matchers.ssd.tensor_ops import EXPONENTIALS

aten = torch.ops.aten
MOST_OPERANDS = 6  # q, k, v, gates, weights, state


class Operands:
    """`leaves` of the core's nodes that `outputs` are made of, and the nodes `inside`: those between.

    No leaf is made of another: where the core takes k and beta * k, the product is inside.
    """

    def __init__(self, algebra: Algebra, core: Set[Node], outputs: Iterable[Node]) -> None:
        self.algebra = algebra
        self.inside = _behind(outputs, core)
        self.leaves: list[Node] = []
        entering = dict.fromkeys(a for n in sorted(self.inside) for a in tensors(n) if a not in self.inside)
        ends = self._open([n for n in entering if n not in algebra.constants])
        for _ in range(3):  # a loop's pieces of a piece
            if len({self._source(n)[0] for n in ends}) <= MOST_OPERANDS:
                break
            ends = self._open(self._wholes(ends))
        self._choose(ends)
        self._close()

    def copy(self) -> Operands:
        return copy.copy(self)

    def widen(self, before: Mapping[Node, Before]) -> None:
        """Put what stands between leaves and what they are made of inside."""
        self.leaves = list(dict.fromkeys(before[n].node if n in before else n for n in self.leaves))
        self.inside = self.inside.union(*(at.between for at in before.values()))
        self._close()

    def _close(self) -> None:
        self.inside = self.inside | {c for n in self.inside for a in tensors(n) for c in constants_of(self.algebra, a)}
        self.inside -= set(self.leaves)

    def _open(self, ends: Iterable[Node]) -> list[Node]:
        """`ends`, those that are made of others or exponentials opened."""
        ends = dict.fromkeys(ends)
        while True:
            sources = {self._source(n)[0] for n in ends}
            opened = self._made_of_others(ends, sources)
            for n in ends:
                source = self._source(n)[0]
                if source.target in EXPONENTIALS and source in self.algebra.nodes:
                    opened.add(n)
            if not opened:
                return list(ends)
            for n in opened:
                del ends[n]
                source, between = self._source(n)
                self.inside |= between | {source}
                ends.update(dict.fromkeys(a for a in self.algebra.inputs(source) if a not in self.inside))

    def _made_of_others(self, ends: Iterable[Node], sources: Set[Node]) -> set[Node]:
        known: dict[Node, bool] = {}

        def reaches(n: Node) -> bool:
            """Whether something `n` is made of, beside itself, is a source."""
            stack = [n]
            while stack:
                m = stack[-1]
                inputs = self.algebra.inputs(m) if m in self.algebra.nodes else []
                todo = [a for a in inputs if a not in known and a not in sources]
                if todo:
                    stack += todo
                    continue
                known[m] = any(a in sources or known[a] for a in inputs)
                stack.pop()
            return known[n]

        return {n for n in ends if reaches(self._source(n)[0])}

    def _source(self, n: Node) -> tuple[Node, set[Node]]:
        between = set()
        while self.algebra.passes_on(n):
            between.add(n)
            n = n.args[0]  # type: ignore[assignment]
        return n, between

    def _wholes(self, ends: list[Node]) -> list[Node]:
        """`ends`, those that are pieces of one tensor replaced by it."""
        pieces = {n: piece for n in ends if (piece := self._whole(n)) is not None}
        counts = Counter(whole for whole, _ in pieces.values())
        found = []
        for n in ends:
            whole, between = pieces.get(n, (n, set()))
            if counts[whole] > 1:
                self.inside |= between
                n = whole
            found.append(n)
        return found

    def _whole(self, n: Node) -> tuple[Node, set[Node]] | None:
        """(what `n` is a piece of, the nodes between)."""
        at, between = self._source(n)
        if at.target is operator.getitem and at.args[0].target in SPLITS | {aten.unbind.int}:  # type: ignore[union-attr]
            between.add(at)
            at = at.args[0]  # type: ignore[assignment]
        if at.target not in PARTS | SPLITS or at not in self.algebra.nodes:
            return None
        return at.args[0], between | {at}  # type: ignore[return-value]

    def _choose(self, ends: Iterable[Node]) -> None:
        """One leaf for each source: before repetitions, casts and padding, behind views alone."""
        by_source: dict[Node, list[Node]] = {}
        for n in ends:
            by_source.setdefault(self._source(n)[0], []).append(n)
        for source, several in by_source.items():
            chosen = {operand_of(self.algebra, n)[0] for n in several}
            leaf = chosen.pop() if len(chosen) == 1 else source
            for n in several:
                while n is not leaf:
                    self.inside.add(n)
                    n = n.args[0]  # type: ignore[assignment]
            self.leaves.append(leaf)


def _behind(outputs: Iterable[Node], core: Set[Node]) -> set[Node]:
    found, pending = set[Node](), list(outputs)
    while pending:
        n = pending.pop()
        if n in core and n not in found:
            found.add(n)
            pending += tensors(n)
    return found
