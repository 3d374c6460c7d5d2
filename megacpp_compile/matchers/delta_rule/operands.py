"""The operands of a core: each the value of every token, from which all that enters the core is made token by token."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Set

from torch.fx import Node

from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.walks import made_from, reached
from megacpp_compile.matchers.delta_rule.norms import Before
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, constants_of, operand_of, tensors
from megacpp_compile.matchers.ssd.tensor_ops import EXPONENTIALS
from megacpp_compile.reader.links import above
from megacpp_compile.reader.parts import part_of

MOST_OPERANDS = 6  # q, k, v, gates, weights, state
MOST_CUT = 24  # tensors that a loop takes pieces of, or pieces of those


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of `whole`, the nodes `between`, and what is comparable of its place in a dimension."""

    whole: Node
    between: set[Node]
    at: object


class Operands:
    """`leaves` of the core's nodes that `outputs` are made of, and the nodes `inside`: those between.

    No leaf is made of another: where the core takes k and beta * k, the product is inside. apart: loops that run one
    after another are taken not to run over one dimension. merged: of how many tensors pieces are taken for that tensor
    although there are no more of them than operands; `in_pieces`: whether there is another.
    """

    apart = True

    def __init__(self, algebra: Algebra, core: Set[Node], outputs: Iterable[Node], merged: int = 0) -> None:
        self.algebra = algebra
        self.inside = _ancestors(outputs, core)
        self.leaves: list[Node] = []
        entering = dict.fromkeys(a for n in sorted(self.inside) for a in tensors(n) if a not in self.inside)
        ends = self._open([n for n in entering if n not in algebra.constants])
        for _ in range(MOST_CUT):
            few = len({self.algebra.source(n) for n in ends}) <= MOST_OPERANDS
            pieces = {} if few and not merged else self._last_pieces(ends)
            if not pieces:
                break
            merged -= few
            self.inside = self.inside.union(*(piece.between for piece in pieces.values()))
            ends = self._open(pieces[n].whole if n in pieces else n for n in ends)
        self.in_pieces = bool(self._last_pieces(ends))
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
            sources = {self.algebra.source(n) for n in ends}
            opened = self._made_of_others(ends, sources)
            for n in ends:
                source = self.algebra.source(n)
                if source.target in EXPONENTIALS and source in self.algebra.nodes:
                    opened.add(n)
            if not opened:
                return list(ends)
            for n in opened:
                del ends[n]
                source, between = self.algebra.path(n)
                self.inside |= between | {source}
                ends.update(dict.fromkeys(a for a in self.algebra.inputs(source) if a not in self.inside))

    def _made_of_others(self, ends: Iterable[Node], sources: Set[Node]) -> set[Node]:
        """Those of `ends` that are made of any of `sources` beside their own."""
        made = made_from(sources, sorted(self.algebra.ancestors(sources) & self.algebra.nodes), self.algebra.inputs)
        return {n for n in ends if self.algebra.source(n) in made}

    def _last_pieces(self, ends: list[Node]) -> dict[Node, _Piece]:
        """Those of `ends` that are pieces of the last tensor of which several are, and of those that are cut alike: a
        loop takes apart what was split off a projection before."""
        pieces = {n: piece for n in ends if (piece := self._piece(n)) is not None}
        cuts = {whole: {*at} for whole, at in by_key((piece.whole, piece.at) for piece in pieces.values()).items()}
        last = max((whole for whole, at in cuts.items() if len(at) > 1), default=None)
        if last is None:
            return {}
        wholes = {whole for whole, at in cuts.items() if len(at & cuts[last]) > 1}
        return {n: piece for n, piece in pieces.items() if piece.whole in wholes}

    def _piece(self, n: Node) -> _Piece | None:
        at, between = self.algebra.path(n)
        part = part_of(at)
        if part is None or part.by not in self.algebra.nodes:
            return None
        return _Piece(part.source, between | {at, part.by}, repr((part.start, part.size, part.step, part.kept)))

    def _choose(self, ends: Iterable[Node]) -> None:
        """One leaf for each source: before repetitions, casts and padding, behind views alone."""
        for source, several in by_key((self.algebra.source(n), n) for n in ends).items():
            chosen = {operand_of(self.algebra, n)[0] for n in several}
            leaf = chosen.pop() if len(chosen) == 1 else source
            for n in several:
                self.inside.update(above(n, leaf))
            self.leaves.append(leaf)


def _ancestors(outputs: Iterable[Node], core: Set[Node]) -> set[Node]:
    return set(reached(filter(core.__contains__, outputs), lambda n: filter(core.__contains__, tensors(n))))
