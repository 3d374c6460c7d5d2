"""Tables that a RoPE op reads by a token's position in its document, instead of as many rows as there are tokens.

Before: `cos, sin = cos_cache[positions], sin_cache[positions]`, where `positions` start anew at every offset of
        `cu_seqlens` (`matchers/documents.py`), and a rotation by them
After:  the op reads the caches themselves, `cu_seqlens` beside them (thd, as Megatron calls it)

Bytes, of tokens t, caches of P rows of w elements of e bytes, in a step of n layers: gathered, 2twe are written once,
kept for backward, and 4twe read in each layer; by position, each layer reads 4 min(t, P)we, and nothing is written or
kept. So the tables are never the more expensive for it, unless the model casts what it gathered: the caches are then
cast instead, which pays where they are no longer than the text.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.fx.views import UNSQUEEZE, is_cast
from megacpp_compile.matchers.documents import Offsets, positions
from megacpp_compile.matchers.rope.heads import Head
from megacpp_compile.matchers.rope.lanes import Source, is_one, precision
from megacpp_compile.matchers.rope.rotation import Rotation, Table
from megacpp_compile.passes._rewrites import rotations
from megacpp_compile.reader.links import chain


@dataclasses.dataclass(frozen=True)
class _Cache:
    """Entries of a cache of rows, from which a table was gathered by positions that begin anew at `offsets`.

    at: the head's dimension of the tokens. dtype: what the gathered rows were rounded to, None where they were not.
    """

    table: Table
    at: int
    offsets: Offsets
    dtype: torch.dtype | None

    def rows(self, build: Builder) -> Table:
        """The entries as a table of two dimensions, positions and heads."""
        source = self.table.source
        node = source.node if self.dtype is None else build.cast(source.node, self.dtype)
        return dataclasses.replace(self.table, source=dataclasses.replace(source, node=node, dims=(0, -1)))


@dataclasses.dataclass(frozen=True)
class Packed:
    """A rotation whose tables are read by position. order: the head's dimensions of the tokens and of the heads; the
    others are 1 wide."""

    order: list[int]
    cos: _Cache
    sin: _Cache

    @property
    def sources(self) -> list[Node]:
        """The nodes that stand for the gathered tables."""
        return [self.cos.table.source.node, self.sin.table.source.node, self.cos.offsets.base]

    def rotation(self, build: Builder, rotation: Rotation) -> Rotation:
        """`rotation`, of tokens and heads alone, by the caches."""
        rotated = rotations.reordered(rotation, self.order)
        return dataclasses.replace(rotated, cos=self.cos.rows(build), sin=self.sin.rows(build))

    def kernel_offsets(self, build: Builder) -> Node:
        """The offsets as the ops take them, int32. The model's own, which positions are computed from, stay what they
        are, int64 as a rule; this is the one place where one is made of the other."""
        offsets = self.cos.offsets
        row = offsets.base
        if value(row).dim() > 1:
            row = build(aten.squeeze.default, row)
        if offsets.first or offsets.dropped:
            row = build(aten.slice.Tensor, row, 0, offsets.first, -offsets.dropped if offsets.dropped else 1 << 62)
        return build.cast(row, torch.int32)


def packed(head: Head, *others: Head) -> Packed | None:
    """How the rotation of `head`, and of `others` with it, may read its tables by position; None where it may not."""
    cos, sin = (_cache(t) for t in (head.rotation.cos, head.rotation.sin))
    if cos is None or sin is None or (cos.at, cos.offsets) != (sin.at, sin.offsets):
        return None
    order = _token_and_head(cos.at, head, *others)
    return None if order is None else Packed(order, cos, sin)


def operands(
    build: Builder, by_position: Packed | None, head: Head, *others: Head
) -> tuple[Rotation, list[int], list[Node]]:
    """(the rotation of `head` as the op takes it, the order of its dimensions, the offsets of documents if the tables
    are read by position)."""
    if by_position is None:
        return *rotations.in_memory_order(head, *others), []
    return by_position.rotation(build, head.rotation), by_position.order, [by_position.kernel_offsets(build)]


def _token_and_head(at: int, head: Head, *others: Head) -> list[int] | None:
    """The dimension of the tokens, `at`, and that of the heads, if no other one is wide and memory has them in this
    order."""
    sizes = [[s for s, k in zip(h.lanes.sizes, h.lanes.kinds, strict=True) if k == "o"] for h in (head, *others)]
    count = len(sizes[0])
    wide = [i for i in range(count) if i != at and any(not is_one(s[i]) for s in sizes)]
    rest = wide or [i for i in range(count) if i != at][-1:]
    parts = [part for h in (head, *others) for part in (h.rotation.nope, h.rotation.rope) if part is not None]
    if len(rest) != 1 or any(part.source.dims[at] < 0 for part in parts):
        return None
    order = rotations.in_memory_order(head, *others)[1]
    return [at, rest[0]] if not wide or order.index(at) < order.index(rest[0]) else None


@or_none
def _cache(table: Table) -> _Cache | None:
    """The cache whose rows `table` has, gathered by positions in documents."""
    source = table.source
    dims, lane_dims, dtype = list(source.dims), list(source.lane_dims), value(source.node).dtype
    *views, node = chain(source.node, is_cast, UNSQUEEZE)
    for view in views:
        if view.target is UNSQUEEZE:
            gone = view.args[1] % value(view).dim()
            dims, lane_dims = ([d - (d > gone) for d in of] for of in (dims, lane_dims))
    casts = sum(map(is_cast, views))
    gathered = _gathered(node)
    along = [(at, d) for at, d in enumerate(dims) if d >= 0]
    if gathered is None or len(along) != 1:
        return None
    cache, index = gathered
    (at, dim), rank, offsets = along[0], value(index).dim(), positions(index)
    others = [n for d, n in enumerate(value(node).shape) if d not in (dim, *lane_dims)]
    if offsets is None or dim >= rank or any(d < rank for d in lane_dims) or not all(map(is_one, others)):
        return None
    NoMatch.when(len({value(n).device for n in (cache, index, offsets.base)}) > 1)
    rounded = precision(dtype) < precision(value(cache).dtype)
    NoMatch.when(casts > 1 or rounded and hint(value(cache).shape[0]) > elements(value(index)))
    base = Source(cache, (), tuple(d - rank + 1 for d in lane_dims), source.part)
    return _Cache(dataclasses.replace(table, source=base), at, offsets, dtype if rounded else None)


def _gathered(node: Node) -> tuple[Node, Node] | None:
    """(tensor, integers) where `node` is the rows of the tensor at these integers."""
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        rows, index = node.args[0], node.args[1][0]  # type: ignore[index]
    elif node.target is aten.index_select.default and node.args[1] == 0:
        rows, index = node.args[0], node.args[2]
    elif node.target is aten.embedding.default:
        rows, index = node.args[:2]
    else:
        return None
    return (rows, index) if value(rows).dim() > 1 and not value(index).dtype == torch.bool else None
