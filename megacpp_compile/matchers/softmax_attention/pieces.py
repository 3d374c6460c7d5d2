"""What a part of a loop reads of a larger tensor: one head, or some of its tokens."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size
from megacpp_compile.fx.views import COPIES, PERMUTATIONS, UNIT_DIMS
from megacpp_compile.matchers.softmax_attention.parts import Groups
from megacpp_compile.reader.dims import below
from megacpp_compile.reader.parts import part_of


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor as a piece of `node`. dims: its dimensions in the order of those of `node`, `()` for one that it has one
    element of; starts: the first element of each, None where it has all."""

    node: Node
    dims: Groups
    starts: tuple[int | None, ...]


def pieces_of(node: Node, dims: Groups) -> list[Piece]:
    """`node` as all of itself, and as a piece of whatever it is cut out of, the nearest first."""
    found = [Piece(node, dims, (None,) * len(dims))]
    while (wider := _wider(found[-1])) is not None:
        found.append(wider)
    return found


@or_none
def _wider(piece: Piece) -> Piece | None:
    """`piece` of what its node is a view of, or cut out of."""
    node, dims, starts = piece.node, piece.dims, piece.starts
    NoMatch.when(node.op != "call_function" or not node.args or not isinstance(source := node.args[0], Node))
    if node.target not in COPIES | PERMUTATIONS | UNIT_DIMS:
        return _cut(node, dims, starts)
    sides = NoMatch.unless(below(node, list(zip(dims, starts, strict=True)), ((), None)))
    own, first = tuple(d for d, _ in sides), tuple(s for _, s in sides)
    lost = sum(start is not None for start in starts) - sum(start is not None for start in first)
    return None if lost else Piece(source, own, first)


def _cut(node: Node, dims: Groups, starts: tuple[int | None, ...]) -> Piece | None:
    """A piece of what `node` is cut out of along one dimension."""
    part = part_of(node)
    if part is None or part.step != 1 or not isinstance(part.start, int) or part.start < 0:
        return None
    dim, start = part.dim, part.start
    if not part.kept:
        return Piece(part.source, (*dims[:dim], (), *dims[dim:]), (*starts[:dim], start, *starts[dim:]))
    cut = starts[dim] is not None or not same_size(part.size, part.whole)
    return Piece(part.source, dims, (*starts[:dim], start + (starts[dim] or 0) if cut else None, *starts[dim + 1 :]))
