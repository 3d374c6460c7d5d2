"""What a part of a loop reads of a larger tensor: one head, or some of its tokens."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import COPIES, PERMUTATIONS, SPLITS, UNIT_DIMS
from megacpp_compile.matchers.softmax_attention.parts import Groups
from megacpp_compile.matchers.ssd.atoms import is_one
from megacpp_compile.reader.dims import unpermuted

aten = torch.ops.aten


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


def _wider(piece: Piece) -> Piece | None:
    """`piece` of what its node is a view of, or cut out of."""
    node, dims, starts = piece.node, piece.dims, piece.starts
    if node.op != "call_function" or not node.args or not isinstance(source := node.args[0], Node):
        return None
    if node.target in COPIES:
        return Piece(source, dims, starts)
    if node.target in PERMUTATIONS:
        return Piece(source, tuple(unpermuted(node, dims)), tuple(unpermuted(node, starts)))
    if node.target in UNIT_DIMS:
        shapes = value(node).shape, value(source).shape
        kept = iter([one for one, n in zip(zip(dims, starts, strict=True), shapes[0], strict=True) if not is_one(n)])
        sides = [((), None) if is_one(n) else next(kept) for n in shapes[1]]
        whole = all(start is None for start, n in zip(starts, shapes[0], strict=True) if is_one(n))
        return Piece(source, tuple(d for d, _ in sides), tuple(s for _, s in sides)) if whole else None
    return _cut(node, source, dims, starts)


def _cut(node: Node, source: Node, dims: Groups, starts: tuple[int | None, ...]) -> Piece | None:
    """A piece of what `node` is cut out of along one dimension."""
    args: list[Any] = [*node.args, None, None, None, None]
    several = source if node.target is operator.getitem else None
    one = node.target is aten.select.int or several is not None and several.target is aten.unbind.int
    if node.target is aten.select.int:
        dim, start = args[1], args[2]
    elif node.target is aten.slice.Tensor and args[4] in (None, 1):
        dim, start = args[1] or 0, args[2] or 0
    elif several is not None and several.target in SPLITS | {aten.unbind.int}:
        own = 1 if one else 2
        dim, index, source = (several.args[own] if len(several.args) > own else 0), args[1], several.args[0]  # type: ignore[assignment]
        start = index if one else sum(part.shape[dim] for part in value(several)[:index])
    else:
        return None
    rank, size = value(source).dim(), value(source).shape[dim]
    if not isinstance(start, int) or not isinstance(dim, int) or start < 0 and not isinstance(size, int):
        return None
    dim, start = dim % rank, start if start >= 0 else start + size
    if one:
        return Piece(source, (*dims[:dim], (), *dims[dim:]), (*starts[:dim], start, *starts[dim:]))
    before = 0 if starts[dim] is None else starts[dim]
    cut = starts[dim] is not None or not same_size(value(node).shape[dim], size)
    return Piece(source, dims, (*starts[:dim], start + before if cut else None, *starts[dim + 1 :]))  # type: ignore[operator]
