"""The boundary of a scan's subgraph: which nodes are its operands, and which are inside."""

from __future__ import annotations

import operator

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import SCALINGS
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import PARTS
from megacpp_compile.fx.walks import reached
from megacpp_compile.matchers.ssd.resize_rules.writes import SCATTERS
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, constants_of, read_operand, tensors
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS
from megacpp_compile.reader.links import through
from megacpp_compile.reader.parts import part_of

MOST_OPERANDS = 7


class OperandBoundary:
    """The operands (`found`) and the nodes between them and the result (`inside`) of one scan. `documents`: the tensors
    that its masks are made of.

    What the step `dt` reaches is inside. What is multiplied or added to that is followed upstream to the operands,
    through contractions of two of them (C . B^T), and through D * x where x is one already.
    """

    def __init__(self, algebra: Algebra, carrying: set[Node], dt: Node) -> None:
        self.algebra, self.dt, self.inside = algebra, dt, set(carrying)
        self.found: dict[Node, None] = {dt: None}
        self.documents: dict[Node, None] = {}
        self._chunks: set[Node] = set()

    def leaves(self, root: Node) -> list[Node]:
        carrying = set(self.inside)
        skips = []
        for n in sorted(carrying):
            for a in tensors(n):
                if a in carrying or a is self.dt:
                    continue
                if a.target in (aten.mul.Tensor,) and n.target in (aten.add.Tensor,) and a in self.algebra.nodes:
                    skips.append(a)
                else:
                    self.descend(a)
        for a in skips:
            known = {self.algebra.source(n) for n in self.found}
            if any(self.algebra.source(b) in known for b in tensors(a)):
                self.inside.add(a)
                for b in tensors(a):
                    self.descend(b)
            else:
                self.descend(a)
        return self._one_of_each()

    def descend(self, n: Node, summed: bool = False) -> None:
        """Follow `n`, which the step does not reach, to operands. summed: a sum downstream makes `n` a contraction."""
        algebra = self.algebra
        if n in self.inside or n in self.found:
            return
        if n in algebra.constants:
            self.inside |= constants_of(algebra, n)
            return
        if algebra.is_mask(n):
            self._mask(n)
            return
        at, between = self.algebra.path(n)
        inputs = algebra.inputs(at)
        mixes = at in algebra.nodes and (
            at.target in CONTRACTIONS
            and len(tensors(at)) == 2
            or at.target is aten.sum.dim_IntList
            or summed
            and at.target is aten.mul.Tensor
            and len(inputs) == 2
            or self._multiplied_scores(at)
            or self._written(at)
        )
        if mixes:
            self.inside |= {at} | between
            for a in tensors(at):
                self.descend(a, at.target is aten.sum.dim_IntList or summed and len(inputs) == 1)
            return
        self.found[read_operand(algebra, n, self.inside)] = None

    def _mask(self, n: Node) -> None:
        if self.algebra.masks is None or n not in self.algebra.masks.made:
            self.documents[n] = None
            return
        self.inside.add(n)
        for a in tensors(n):
            self.descend(a)

    def _multiplied_scores(self, n: Node) -> bool:
        """Whether `n` is a contraction with constants applied to it, numbers among them; an operand with constants
        applied is none."""
        changed = False
        while n in self.algebra.nodes:
            inputs = self.algebra.inputs(n)
            if len(inputs) != 1 or len(tensors(n)) != 2 and n.target not in SCALINGS:
                return changed and (n.target in CONTRACTIONS or n.target is aten.sum.dim_IntList)
            n, changed = self.algebra.source(inputs[0]), True
        return False

    def _written(self, n: Node) -> bool:
        """Whether `n` is what something is written into, as a state is into those of all chunks, or is read of that."""
        n = through(n, lambda m: m in self.algebra.nodes and m.target in PARTS and self.algebra.source(m.args[0]))
        return n in self.algebra.nodes and n.target in SCATTERS

    def _whole(self, n: Node) -> tuple[Node, set[Node]]:
        """(the tensor that `n` is an element or a chunk of, the nodes between)."""
        source, between = self.algebra.path(n)
        if source.target is aten.select.int and source in self.algebra.nodes or source in self._chunks:
            several = source.args[0]
            if source.target is operator.getitem:
                between, several = between | {several}, several.args[0]  # type: ignore[union-attr, arg-type]
            whole, others = self.algebra.path(several)  # type: ignore[arg-type]
            return whole, between | {source} | others
        return source, set()

    def _sliced(self) -> set[Node]:
        """Operands that are chunks: slices or pieces of one tensor along a dimension that is not the last, which has
        channels."""
        cut: dict[tuple[Node, int], set[Node]] = {}
        for n in self.found:
            source, _ = self.algebra.path(n)
            if source not in self.algebra.nodes:
                continue
            part = part_of(source)
            if part is not None and part.kept and part.dim != value(source).dim() - 1:
                cut.setdefault((part.source, part.dim), set()).add(source)
        return set().union(*(several for several in cut.values() if len(several) > 1))

    def from_exponents(self, decays: list[Node]) -> set[Node]:
        seen = reached(decays, lambda n: tensors(n) if n in self.inside and n not in self.found else [])
        return set(self.found).intersection(seen)

    def _one_of_each(self) -> list[Node]:
        """The operands, one for each source: where two views of one tensor are read, that tensor."""
        by_source: dict[Node, list[Node]] = {}
        picked = len(self.found) > MOST_OPERANDS  # chunks are read one by one, in a loop
        self._chunks = self._sliced() if picked else set()
        for leaf in self.found:
            source, between = self._whole(leaf) if picked else (self.algebra.source(leaf), set())
            if between:
                self.inside |= between
            by_source.setdefault(source, []).append(leaf)
        chosen = []
        for source, leaves in by_source.items():
            if len(leaves) > 1:
                for leaf in leaves:
                    at, between = self.algebra.path(leaf)
                    self.inside |= between
            chosen.append(leaves[0] if len(leaves) == 1 and source is self.algebra.source(leaves[0]) else source)
        self.inside |= {c for n in list(self.inside) for a in tensors(n) for c in constants_of(self.algebra, a)}
        self.inside -= set(chosen)
        return chosen
