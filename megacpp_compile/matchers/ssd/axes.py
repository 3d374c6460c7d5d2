"""Which dimensions of a subgraph's tensors are the same dimension, so that it can be run at other sizes.

A captured graph has its sizes burnt in: `view(x, [4, 16, 256, 64, 64])`. What it computes is seldom about those
numbers. Here each dimension becomes a list of *atoms*: dimensions that meet in an elementwise op or a contraction are
the same atom, a view splits and merges atoms, padding and slices make an atom that is longer or shorter than another by
a constant. Atoms can then be given small sizes, and the subgraph runs, as the same function, on small tensors.

What is about a number (a band of a mask, an element picked from the middle) *pins* its atoms: they keep their size.
A dimension of size 1 has no atoms and stays so.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Node

from megacpp_compile.fx.edit import same_size
from megacpp_compile.fx.groups import by_key
from megacpp_compile.matchers.ssd.allowed import in_turn
from megacpp_compile.matchers.ssd.atoms import Atom, Dim, Dims, NoAxes, bind, flat, fresh, is_one, length, number, pin
from megacpp_compile.matchers.ssd.pieces import Piece, SliceLoops, comparable

LARGEST_PINNED = 64
SMALL = (3, 4, 5)
PADDING = 2  # stands for any padding of more than one element


@dataclasses.dataclass
class Longer:
    """`whole` is as long as all of `parts` and `extra` elements together. `cut`: `parts` are what a slice leaves."""

    whole: Dim
    parts: list[Dim]
    extra: Any
    cut: bool = False


class AxisEquations:
    """The equations between atoms, and a small size for each of them."""

    def __init__(self, largest_pinned: int = LARGEST_PINNED, small: Sequence[int] = SMALL) -> None:
        self.largest_pinned, self.small = largest_pinned, small
        self.lengths: list[Longer] = []
        self.shortened: list[Longer] = []  # what loops take apart step by step, and the part that stands for it
        self.picked: list[tuple[Dim, Piece]] = []
        self.kept_apart = False  # whether dimensions that are taken apart alike are two
        self.sizes: dict[Atom, int] = {}
        self.chosen: dict[Atom, Sequence[int]] = {}  # sizes to take in turn, where these are not small ones
        self.turn = 0

    # -- equations

    def same(self, a: Dim, b: Dim) -> None:
        """`a` and `b` are one dimension."""
        left, right = flat(a), flat(b)
        while left and right:
            if left[0] is right[0] or same_size(left[0].size, right[0].size):
                bind(right[0], [left[0]])
            elif len(left) == 1:
                bind(left[0], right)
                return
            elif len(right) == 1:
                bind(right[0], left)
                return
            else:
                one, other = (left, right) if _larger(left[0], right[0]) else (right, left)
                bind(one[0], [other[0], Atom(_quotient(one[0].size, other[0].size))])
                one[:1] = flat(one[:1])
                continue
            left, right = left[1:], right[1:]
        NoAxes.when(left or right, "sizes do not agree")

    def regroup(self, dims: Sequence[Dim], sizes: Sequence[Any]) -> list[Dim]:
        """The dimensions of a view with `sizes` of a tensor with `dims`."""
        atoms = [a for d in dims for a in flat(d)]
        out: list[Dim] = [[] for _ in sizes]
        todo = [i for i, s in enumerate(sizes) if not is_one(s)]
        while atoms and todo and same_size(atoms[0].size, sizes[todo[0]]):
            out[todo.pop(0)] = [atoms.pop(0)]
        while atoms and todo and same_size(atoms[-1].size, sizes[todo[-1]]):
            out[todo.pop()] = [atoms.pop()]
        while atoms and todo:
            if len(todo) == 1:
                out[todo.pop()], atoms = atoms, []
            elif len(atoms) == 1:
                parts = [Atom(sizes[i]) for i in todo]
                for i, part in zip(todo, parts, strict=True):
                    out[i] = [part]
                bind(atoms[0], parts)
                atoms, todo = [], []
            else:
                self._run(atoms, todo, sizes, out)
        NoAxes.when(atoms or todo, "a view does not regroup whole dimensions")
        return out

    def _run(self, atoms: list[Atom], todo: list[int], sizes: Sequence[Any], out: list[Dim]) -> None:
        """One dimension of a view on each side, or one against several."""
        have, want = atoms[0].size, sizes[todo[0]]
        if not isinstance(have, int) or not isinstance(want, int):
            # What is symbolic stays over once the other end is told.
            for n in range(2, len(atoms)):
                if same_size(math.prod(a.size for a in atoms[-n:]), sizes[todo[-1]]):
                    out[todo.pop()] = atoms[-n:]
                    del atoms[-n:]
                    return
            raise NoAxes("a view of symbolic sizes can't be followed")
        if have < want:
            count = next((n for n in range(1, len(atoms) + 1) if math.prod(a.size for a in atoms[:n]) == want), None)
            NoAxes.when(count is None, "a view does not regroup whole dimensions")
            out[todo.pop(0)] = atoms[:count]
            del atoms[:count]
            return
        if have > want:
            bind(atoms[0], [Atom(want), Atom(_quotient(have, want))])
            atoms[:1] = flat(atoms[:1])
        out[todo.pop(0)] = [atoms.pop(0)]

    def longer(self, parts: list[Dim], extra: Any, size: Any) -> Dim:
        """A dimension as long as all `parts` and `extra` elements together."""
        whole = fresh(size)
        self.lengths.append(Longer(whole, parts, extra))
        return whole

    def repeated(self, part: Dim, nodes: Sequence[Node]) -> Dim:
        """`part` as often as there are `nodes`, one behind another, as a loop over it puts its results together."""
        times = fresh(len(nodes))
        pin([times])
        for i, node in enumerate(nodes):
            self.pick(times, i, node)
        whole = [*times, *part]
        self.lengths.append(Longer(whole, [part] * len(nodes), 0))
        return whole

    def stands_for(self, short: Dim, whole: Dim) -> None:
        """`short` is what a few steps of a loop take of `whole`, or leave of it: as long, whatever that is."""
        self.shortened.append(Longer(whole, [short], 0))

    def shorter(self, dim: Dim, size: Any) -> Dim:
        """A dimension of `size`, what a slice leaves of `dim`: what it was before padding, where that is its length."""
        for eq in self.lengths:
            if flat(eq.whole) == flat(dim) and len(eq.parts) == 1 and same_size(length(eq.parts[0]), size):
                return eq.parts[0]
        part = fresh(size)
        self.lengths.append(Longer(dim, [part], length(dim) - size, cut=True))
        return part

    def pick(self, dim: Dim, at: object, node: Node | None) -> None:
        """One element or slice `at` (an index, or start and size) of `dim` is read, or put there: `node`."""
        if flat(dim):
            self.picked.append((dim, Piece(comparable(at), node)))

    def pick_each(self, dim: Dim, all_of: Sequence[object], several: Node) -> None:
        """`several` has a piece of `dim` at each of `all_of`."""
        for at in all_of:
            self.pick(dim, at, None)
        for user in several.users:
            if user.target is operator.getitem:
                self.pick(dim, all_of[user.args[1]], user)  # type: ignore[index]

    def close(self, nodes: Sequence[Node] | None = None) -> None:
        """Find dimensions that are one although no op makes them meet. nodes: those of the subgraph, to tell apart what
        loops take apart one after another; without them, all that is taken apart alike is one dimension."""
        self._join_picked(nodes)
        self._join_shortened()
        self._join_padded()
        self._pin_cut()

    def _join_picked(self, nodes: Sequence[Node] | None) -> None:
        """What a loop takes apart into the same pieces, of several tensors, is one dimension."""
        pieces = by_key(((tuple(flat(dim)), isinstance(piece.at, tuple)), piece) for dim, piece in self.picked)
        alike: dict[object, list[tuple[Dims, list[Piece]]]] = {}
        for (atoms, _), read in pieces.items():
            size, several = length(list(atoms)), frozenset(piece.at for piece in read)
            if len(several) > 1:
                known = number(size)
                alike.setdefault((comparable(size) if known is None else known, several), []).append((atoms, read))
        for loops in alike.values():
            for one in self._in_one_loop(loops, nodes) if len(loops) > 1 else ():
                self._join(one)

    def _in_one_loop(
        self, loops: list[tuple[Dims, list[Piece]]], nodes: Sequence[Node] | None
    ) -> list[list[Dims]]:
        """The dimensions of `loops`, parted where these run one after another."""
        if nodes is None:
            return [[atoms for atoms, _ in loops]]
        run, parted = SliceLoops(nodes, [read for _, read in loops]), list[list[int]]()
        for i in range(len(loops)):
            known = next((known for known in parted if not any(run.apart(i, other) for other in known)), None)
            if known is None:
                parted.append([i])
            else:
                known.append(i)
        self.kept_apart |= len(parted) > 1
        return [[loops[i][0] for i in members] for members in parted]

    def _join(self, several: list[Dims]) -> None:
        first = list(several[0])
        for atoms in several[1:]:
            if not set(flat(first)) & set(flat(atoms)):
                pin([first, list(atoms)])
                self.same(first, list(atoms))

    def _join_shortened(self) -> None:
        """What one dimension stands for is one."""
        for one, other in itertools.combinations(self.shortened, 2):
            if flat(one.parts[0]) == flat(other.parts[0]) and flat(one.whole) != flat(other.whole):
                self.same(one.whole, other.whole)

    def _join_padded(self) -> None:
        """What becomes one dimension by padding was one before: lengths are equal, whatever they are."""
        changed = True
        while changed:
            changed = False
            one = [eq for eq in self.lengths if len(eq.parts) == 1]
            for eq, other in itertools.combinations(one, 2):
                before = flat(eq.parts[0]), flat(other.parts[0])
                alike = flat(eq.whole) == flat(other.whole) and before[0] != before[1]
                if alike and same_size(length(before[0]), length(before[1])):
                    self.same(*before)
                    changed = True

    def _pin_cut(self) -> None:
        """Keep the sizes of what is cut, but of what was padded before, and where one element is left out."""
        padded = [(flat(eq.whole), flat(eq.parts[0])) for eq in self.lengths if not eq.cut and len(eq.parts) == 1]
        for eq in self.lengths:
            one = isinstance(eq.extra, int) and eq.extra == 1
            if eq.cut and not one and (flat(eq.whole), flat(eq.parts[0])) not in padded:
                pin([eq.whole, eq.parts[0]])

    # -- sizes

    def solve(self, dims: Iterable[Dim], turn: int) -> None:
        """Choose small sizes; `turn` chooses others."""
        self.sizes, self.turn = {}, turn
        atoms: dict[Atom, None] = {}
        inner: dict[Atom, None] = {}  # parts of a product: chosen first, as a sum can't be factored
        equations = [*self.lengths, *self.shortened]
        for dim in [*dims, *(d for eq in equations for d in (eq.whole, *eq.parts))]:
            members = flat(dim)
            atoms.update(dict.fromkeys(members))
            if len(members) > 1:
                inner.update(dict.fromkeys(members))
        for atom in atoms:
            if atom.pinned:
                reason = f"what is done to a dimension of {atom.size} depends on its size"
                self.sizes[atom] = NoAxes.unless(self._at_its_size(atom.size), reason)
                NoAxes.when(self.sizes[atom] > self.largest_pinned, reason)
        for atom, sizes in self.chosen.items():
            self.sizes.setdefault(atom, sizes[turn % len(sizes)])
        for atom in [*inner, *atoms]:
            while self._propagate():
                pass
            if atom not in self.sizes:
                self.sizes[atom] = self.small[(turn + len(self.sizes)) % len(self.small)]
        while self._propagate():
            pass
        for eq in equations:
            NoAxes.when(
                self.size(eq.whole) != sum(map(self.size, eq.parts)) + self._extra(eq),
                "lengths of padded or cut dimensions contradict each other",
            )

    def size(self, dim: Dim) -> int:
        return math.prod(self.sizes[a] for a in flat(dim))

    def _propagate(self) -> bool:
        """Solve one equation that has a single unknown."""
        for eq in (*self.lengths, *self.shortened):
            sides = [eq.whole, *eq.parts]
            unknown = [(i, a) for i, d in enumerate(sides) for a in flat(d) if a not in self.sizes]
            if len(unknown) != 1:
                continue
            side, atom = unknown[0]
            known = [0 if i == side else self.size(d) for i, d in enumerate(sides)]
            extra = self._extra(eq)
            total = sum(known[1:]) + extra if side == 0 else known[0] - sum(known[1:]) - extra
            others = math.prod(self.sizes[a] for a in flat(sides[side]) if a is not atom)
            NoAxes.when(total <= 0 or total % others, "lengths of padded or cut dimensions contradict each other")
            self.sizes[atom] = total // others
            return True
        return False

    def _at_its_size(self, size: Any) -> int | None:
        """`size`, where it is a number, or one of a few in turn; else None."""
        known = number(size)
        return in_turn(size, self.turn) if known is None else known

    def _extra(self, eq: Longer) -> int:
        pinned = all(a.pinned for d in (eq.whole, *eq.parts) for a in flat(d))
        extra = self._at_its_size(eq.extra) if pinned else number(eq.extra)
        return extra if extra is not None and (extra <= 1 or pinned) else PADDING


def _larger(a: Atom, b: Atom) -> bool:
    NoAxes.when(not isinstance(a.size, int) or not isinstance(b.size, int), "symbolic sizes do not agree")
    return a.size > b.size


def _quotient(a: int, b: int) -> int:
    NoAxes.when(a % b, "sizes do not divide")
    return a // b
