"""Queries that a loop takes in chunks, each of which sees all keys or a slice of them, as one attention.

Their masks have to be rows of one. A query of a chunk from token s on sees, of keys from token a on, those up to
`right` beyond its place in the chunk: those up to `right + a - s` beyond its place among all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import uncast
from megacpp_compile.matchers.softmax_attention.conditions import Distance, Hidden
from megacpp_compile.matchers.softmax_attention.parts import Groups
from megacpp_compile.matchers.softmax_attention.pieces import Piece, pieces_of
from megacpp_compile.matchers.softmax_attention.prefixes import Prefix
from megacpp_compile.matchers.softmax_attention.whole import Site, Whole, same_distance
from megacpp_compile.matchers.ssd.atoms import fresh, length
from megacpp_compile.matchers.ssd.packed import alike


@dataclasses.dataclass(frozen=True)
class _Span:
    """The queries of a chunk, from `first` to `last`, and the keys it is given, from `key` to `final`."""

    first: int
    last: int
    key: int
    final: Any


class Queries(Whole):
    free = ("queries", "keys")

    def __init__(self, join: Node, sites: Sequence[Site], ends: Sequence[Groups]) -> None:
        super().__init__(join, sites, ends)
        own = self.founds[self.first]
        self.require(join.target is aten.cat.default and len(own.queries) == 1 and len(own.keys) > 0)
        self.dim = (join.args[1] if len(join.args) > 1 else 0) % value(join).dim()  # type: ignore[operator]
        for end in self.ends:
            wide = end[self.dim] or own.queries
            self.require(wide == own.queries and self.in_place(end, wide) == self.ends[self.first])
        counts: list[Any] = [value(entry).shape[self.dim] for entry in join.args[0]]  # type: ignore[union-attr,arg-type]
        self.require(all(isinstance(n, int) for n in counts))
        self.starts = list(itertools.accumulate(counts, initial=0))
        self.queries, self.own = tuple(fresh(self.starts[-1])), own
        keys = [f.scores.products[0][1] for f in self.founds]
        found = self.pieces([uncast(o.node) for o in keys], [o.dims for o in keys])
        self.require(found is not None and own.keys in found[0].dims)
        whole, parts = found  # type: ignore[misc]
        at = whole.dims.index(own.keys)
        self.size, begins = value(whole.node).shape[at], [part.starts[at] or 0 for part in parts]
        lengths = [length([*f.keys]) for f in self.founds]
        self.spans = [_Span(s, s + n - 1, a, a + m - 1)
                      for s, n, a, m in zip(self.starts, counts, begins, lengths, strict=False)]  # fmt: skip
        self.keys = own.keys if same_size(self.size, length([*own.keys])) else tuple(fresh(self.size))

    def in_place(self, dims: Groups, at: Any) -> Groups:
        return (*dims[: self.dim], at, *dims[self.dim + 1 :])

    def pieces(self, nodes: Sequence[Node], dims: Sequence[Groups]) -> tuple[Piece, list[Piece]] | None:
        """What all `nodes` are pieces of, and as what pieces."""
        own = [pieces_of(node, self.translated(n, of)) for n, (node, of) in enumerate(zip(nodes, dims, strict=True))]
        for whole in own[self.first]:
            parts = [next((p for p in pieces if alike(p.node, whole.node)), None) for pieces in own]
            known = [part for n, part in enumerate(parts) if part is not None and self.is_part(whole, part, n)]
            if len(known) == len(own):
                return whole, known
        return None

    def is_part(self, whole: Piece, part: Piece, n: int) -> bool:
        """Whether `part` is what chunk `n` reads of the node of `whole`, of its keys some slice."""
        for dim, own, first, start in zip(whole.dims, part.dims, whole.starts, part.starts, strict=True):
            if dim == self.own.queries:
                after = self.starts[n] - self.starts[self.first]
                there = first is not None and start == first + after >= self.starts[n]
            else:
                there = dim == self.own.keys or start is None
            if not there or own != dim and (own or dim not in (self.own.queries, self.own.keys)):
                return False
        return True

    def slot(self, nodes: Sequence[Node], dims: Sequence[Groups], shared: bool = False) -> tuple[Node, Groups]:
        if (found := self.pieces(nodes, dims)) is not None:
            return self.cut(*found), self.wide(found[0].dims)
        given = [self.translated(n, of) for n, of in enumerate(dims)]
        first = given[self.first]
        self.require(first.count(self.own.queries) == 1 and not set(self.own.keys) & {a for d in first for a in d})
        at = first.index(self.own.queries)
        for of in given:
            self.require(len(of) == len(first) and (*of[:at], of[at] or self.own.queries, *of[at + 1 :]) == first)
        return self.made_of(lambda call, parts: call(aten.cat.default, parts, at), nodes), self.wide(first)

    def wide(self, dims: Groups) -> Groups:
        new = {self.own.queries: self.queries, self.own.keys: self.keys}
        return tuple(new.get(dim, dim) for dim in dims)

    def cut(self, whole: Piece, parts: Sequence[Piece]) -> Node:
        """Of the node of `whole` what `parts` are of together."""
        node, at = whole.node, list[tuple[int, int, int]]()
        for d, dim in enumerate(whole.dims):
            begin = (parts[0].starts[d] or 0) - (self.spans[0].key if dim == self.own.keys else 0)
            if dim == self.own.keys:
                begins = [(p.starts[d] or 0) - span.key for p, span in zip(parts, self.spans, strict=True)]
                self.require(begin >= 0 and all(b == begin for b in begins))
            size = self.starts[-1] if dim == self.own.queries else self.size
            if dim in (self.own.queries, self.own.keys) and not same_size(value(node).shape[d], size):
                self.require(isinstance(size, int))
                at.append((d, begin, begin + size))
        if not at:
            return node

        def make(call: Any, given: list[Any]) -> Any:
            return functools.reduce(lambda x, one: call(aten.slice.Tensor, x, *one), at, given[0])

        return self.made_of(make, [node])

    def distance(self, side: str) -> Distance | None:
        """Of a query's place among all to a key's, where no chunk hides or lacks other keys than those beyond it."""
        own, sign = [getattr(site.plan, side) for site in self.sites], 1 if side == "right" else -1
        moved = [d and dataclasses.replace(d, number=d.number + sign * (span.key - span.first))
                 for d, span in zip(own, self.spans, strict=True)]  # fmt: skip
        told = [d for d in moved if d is not None]
        whole = told[0] if told else None
        for d, span in zip(moved, self.spans, strict=True):
            least, most = (span.final, self.size - 1) if sign > 0 else (-span.key, 0)
            first, last = (span.first, span.last) if sign > 0 else (-span.last, -span.first)
            sees_all = whole is None or statically_known_true(first + whole.size >= least)
            sees_no_more = whole is not None and statically_known_true(last + whole.size <= least)
            self.require(sees_all if d is None else same_distance(d, whole))
            self.require(sees_no_more or same_size(least, most))
        return whole  # type: ignore[no-any-return]

    def prefix(self) -> Prefix | None:
        """Of all keys, of which each chunk has to be given all."""
        found = super().prefix()
        whole = all(span.key == 0 and same_size(span.final, self.size - 1) for span in self.spans)
        self.require(found is None or whole)
        return found

    def documents(self) -> tuple[Hidden, ...]:
        self.require(not any(site.plan.documents for site in self.sites))
        return ()

    def roles(self) -> dict[str, Any]:
        result = self.in_place(self.ends[self.first], self.queries)
        return {"result_dims": result, "queries": self.queries, "keys": self.keys}
