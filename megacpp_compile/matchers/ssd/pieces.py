"""What loops take apart piece by piece, and put together: dimensions as long as each other are often one, and need not
be. A loop over two chunks is no loop over the two halves of one, however alike their pieces are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node


@dataclasses.dataclass(frozen=True)
class Piece:
    """Element or slice `at` (an index, or start and size) of a dimension: `node` reads it, or is put there."""

    at: object
    node: Node | None = None


class SliceLoops:
    """The loops of a subgraph of `nodes`, in its order: each the pieces of one dimension."""

    def __init__(self, nodes: Sequence[Node], loops: Sequence[Sequence[Piece]]) -> None:
        self._last: list[int] = []  # of each loop: its last piece
        begun: dict[Node, dict[int, int]] = {}  # of each node: the loops it is made in, and the last piece it has
        for i, pieces in enumerate(loops):
            order = {at: rank for rank, at in enumerate(sorted({p.at for p in pieces}, key=_start))}
            self._last.append(len(order) - 1)
            for piece in pieces:
                if piece.node is not None:
                    own = begun.setdefault(piece.node, {})
                    own[i] = max(own.get(i, 0), order[piece.at])
        self._made: list[dict[int, int]] = []
        reached: dict[Node, dict[int, int]] = {}
        for n in nodes:
            reached[n] = _latest([begun.get(n, {}), *(reached.get(a, {}) for a in n.all_input_nodes)])
            if len(reached[n]) > 1:
                self._made.append(reached[n])

    def apart(self, a: int, b: int) -> bool:
        """Whether one of two loops has run to its end wherever anything is made of both."""
        both = [(made[a], made[b]) for made in self._made if a in made and b in made]
        return bool(both) and any(all(at[i] == self._last[loop] for at in both) for i, loop in enumerate((a, b)))


def _latest(several: Sequence[dict[int, int]]) -> dict[int, int]:
    some = [one for one in several if one]
    if all(one is some[0] or one == some[0] for one in some):
        return some[0] if some else {}
    found: dict[int, int] = {}
    for loop, at in itertools.chain.from_iterable(one.items() for one in some):
        found[loop] = max(found.get(loop, 0), at)
    return found


def _start(at: Any) -> tuple[int, int]:
    start = at[0] if isinstance(at, tuple) else at
    return (0, start) if isinstance(start, int) else (1, 0)


def comparable(at: object) -> object:
    """`at`, symbolic sizes in it as their expressions: a SymInt has no hash."""
    if isinstance(at, tuple):
        return tuple(map(comparable, at))
    return at.node.expr if isinstance(at, torch.SymInt) else at
