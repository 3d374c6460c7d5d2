"""Evaluates the lanes of nodes by a table of rules; what no rule reads becomes a source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.mode_states import ModeStates
from megacpp_compile.fx.views import CASTS, UNIT_DIMS, is_cast
from megacpp_compile.fx.walks import reached
from megacpp_compile.matchers.rope.lanes import (
    EMPTY,
    MAX_LANES,
    MAX_TERMS,
    NONE,
    Lanes,
    Opaque,
    RuleTable,
    Source,
    Term,
    is_one,
    term,
)
from megacpp_compile.matchers.rope.value_numbering import ValueNumbering
from megacpp_compile.reader.links import through

# Table views worth seeing through; anything else (casts, products, cos itself) makes the table it yields.
_SEE_THROUGH = UNIT_DIMS | {
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.repeat_interleave.self_int, aten.slice.Tensor, aten.alias.default, aten.cat.default, aten.neg.default,
    aten.select.int, aten.stack.default,
}  # fmt: skip


class LaneInterpreter:
    """Evaluates nodes of one graph by `rules`. `activations` are the nodes computed from weights; the others are
    tables. `states`: the modes of the graph's nodes.

    `stops` are nodes to take as sources although they could be interpreted (a head split that looks like a pair split).
    """

    pairs = 1  # how many last dimensions of 2 hold pairs of lanes, and pairs of pairs
    fewest = 2  # lanes of a source

    def __init__(
        self, rules: RuleTable, activations: set[Node], states: ModeStates, stops: frozenset[Node] = frozenset()
    ) -> None:
        self.rules, self.activations, self.stops = rules, activations, stops
        self.sources: list[Source] = []
        self._ids: dict[Source, int] = {}
        self._memo: dict[Node, Lanes | None] = {}
        self._opaque: set[Node] = set()
        self._numbering = ValueNumbering(states)
        self._table_views: list[_TableViews] = []  # made on first use
        self.scaled = set[Node]()
        self._firsts: dict[tuple[int, int], tuple[float, int, int]] = {}

    # -- public -------------------------------------------------------------------------------------------------

    def __call__(self, node: Node) -> Lanes | None:
        """The lanes of `node`, or None for a value without a static feature dimension."""
        if node not in self._memo and isinstance(value(node), torch.Tensor):
            # Graphs are deep: collect what is needed, then evaluate in graph order, without recursion.
            for n in sorted(reached([node], self._needed)):
                self._memo[n] = self._evaluate(n)
        return self._memo.get(node)

    def _needed(self, n: Node) -> list[Node]:
        """What has to be evaluated for `n`."""
        read = (n.target in self.rules or is_multi(n)) and n not in self.stops and not self.is_table(n)
        return [a for a in n.all_input_nodes if a not in self._memo] if read else []

    def opaque(self, node: Node) -> bool:
        """Whether `node` was taken as a source rather than interpreted."""
        return node in self._opaque

    def cone(self, root: Node) -> set[Node]:
        """The interpreted nodes `root` is made of, itself included."""
        def interpreted(nodes: Iterable[Node]) -> list[Node]:
            own = [n for n in nodes if n in self.activations and not self.opaque(n)]
            return [n for n in own if self._memo.get(n) is not None or is_multi(n)]

        # The argument of an empty one lends shape and dtype only.
        way = reached(interpreted([root]), lambda n: interpreted(n.all_input_nodes) if n.target not in EMPTY else [])
        return set(way)

    def source_id(self, source: Source) -> int:
        source = dataclasses.replace(source, node=self._numbering.leader(source.node))
        if source not in self._ids:
            self._ids[source] = len(self.sources)
            self.sources.append(source)
        return self._ids[source]

    def table_views(self, table: Node) -> Iterator[Lanes]:
        """The lanes of `table` with the views it is made by resolved, as far as dimensions of 2 are pairs or not."""
        self._table_views = self._table_views or [_TableViews(self, pairs=n) for n in (2, 1, 0)]
        yield from (lanes for views in self._table_views if (lanes := views(table)) is not None)

    def met_again(self, node: Node) -> None:
        """Note that a table multiplies `node`, whose lanes have met one before: perhaps on their way to a rotation."""
        products = (n for n in self.cone(node) if n.target is aten.mul.Tensor)
        self.scaled |= {n for n in products if any(isinstance(a, Node) and self.is_table(a) for a in n.args[:2])}

    def firsts(self, entries: Term, of: Term) -> Term:
        """`entries` of a table put together of the entries `of` other ones, each by the first that is the same."""
        coef, src, lane, of_coef, of_src, of_lane = np.broadcast_arrays(
            entries.coef, entries.src, entries.lane, of.coef, of.src, of.lane
        )
        coef, src, lane = coef.copy(), src.copy(), lane.copy()
        for at in np.ndindex(src.shape):
            own = (float(of_coef[at]), int(src[at]), int(lane[at]))
            first, src[at], lane[at] = self._firsts.setdefault((int(of_src[at]), int(of_lane[at])), own)
            coef[at] = of_coef[at] / first
        return dataclasses.replace(term(coef, NONE, lane), src=src)

    def is_table(self, node: Node) -> bool:
        return node not in self.activations

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _evaluate(self, node: Node) -> Lanes | None:
        if not isinstance(value(node), torch.Tensor):
            return None
        rule = self.rules.get(node.target)
        if rule is not None and node not in self.stops and not self.is_table(node):
            try:
                lanes = rule(self, node)
                if len(lanes.terms) <= MAX_TERMS:
                    return lanes
            except Opaque:
                pass
        self._opaque.add(node)
        # A tensor written in parts is no source: which lanes it holds is what could not be told.
        return None if node.target is aten.slice_scatter.default else self.leaf(node)

    @or_none
    def leaf(self, node: Node) -> Lanes | None:
        """`node` as a source: its last dimension is the lanes, or its last two where the last holds pairs."""
        fake = value(node)
        NoMatch.when(fake.dim() == 0 or fake.is_complex())
        sizes = tuple(fake.shape)
        last = sizes[-self.pairs :] if self.pairs else ()
        twos = next((i for i, n in enumerate(reversed(last)) if not (isinstance(n, int) and n == 2)), len(last))
        count = 1 + min(twos, max(len(sizes) - 2, 0))
        shape = sizes[len(sizes) - count :]
        NoMatch.when(
            not all(isinstance(n, int) for n in shape) or not self.fewest <= (d := math.prod(shape)) <= MAX_LANES
        )
        outer = sizes[: len(sizes) - count]
        dims = tuple(-1 if is_one(n) else i for i, n in enumerate(outer))
        sid = self.source_id(Source(node, dims, tuple(range(len(outer), len(sizes)))))
        entries = term(np.ones(shape), sid, np.arange(d).reshape(shape))
        return Lanes("o" * len(outer) + "l" * count, sizes, [entries])

    def get(self, node: Any) -> Lanes:
        return Opaque.unless(self._memo.get(node) if isinstance(node, Node) else None)

    def dtypes(self, lanes: Lanes) -> set[torch.dtype]:
        ids = {int(i) for t in lanes.terms for i in np.unique(t.src[t.coef != 0]) if i >= 0}
        return {value(self.sources[i].node).dtype for i in ids}

    def redim(self, lanes: Lanes, f: Callable[[tuple[int, ...]], tuple[int, ...]]) -> list[Term]:
        """Terms with every source's outer dimension map sent through `f`."""
        ids = {int(i) for t in lanes.terms for a in (t.src, t.tab) for i in np.unique(a) if i >= 0}
        table = {}
        for i in ids:
            s = self.sources[i]
            table[i] = self.source_id(dataclasses.replace(s, dims=f(s.dims)))
        if all(k == v for k, v in table.items()):
            return lanes.terms

        return [dataclasses.replace(t, src=_renamed(t.src, table), tab=_renamed(t.tab, table)) for t in lanes.terms]


class _TableViews(LaneInterpreter):
    """Reads views only, and what tables are stacked from, on the sources of the interpreter it serves."""

    def __init__(self, host: LaneInterpreter, pairs: int) -> None:
        super().__init__(host.rules, set(), {})
        self.sources, self._ids, self._numbering = host.sources, host._ids, host._numbering
        self.pairs, self.fewest = pairs, 1
        self._unread = set[Node]()  # stacks that were not taken apart, and views of them

    def is_table(self, node: Node) -> bool:
        return node.target not in _SEE_THROUGH and not _rounds_a_stack(node)

    def _evaluate(self, node: Node) -> Lanes | None:
        x = self._memo.get(node.args[0]) if _rounds_a_stack(node) else None  # type: ignore[arg-type]
        if x is None:
            lanes = super()._evaluate(node)
            unread = node.target is aten.stack.default or not self._unread.isdisjoint(node.all_input_nodes)
            if unread and self.opaque(node) and not self.is_table(node):
                self._unread.add(node)
                return None
            return lanes
        ids = {int(i) for t in x.terms for i in np.unique(t.src) if i >= 0}
        if any(self.sources[i].rounded is not None for i in ids):
            return self.leaf(node)
        rounded = {i: self.source_id(dataclasses.replace(self.sources[i], rounded=value(node).dtype)) for i in ids}
        return dataclasses.replace(x, terms=[dataclasses.replace(t, src=_renamed(t.src, rounded)) for t in x.terms])


def _rounds_a_stack(node: Node) -> bool:
    """Whether `node` is a cast of tables that are stacked, as rotation matrices are made of cosines and sines."""
    if not is_cast(node):
        return False
    return through(node, (_SEE_THROUGH | CASTS) - {aten.stack.default, aten.cat.default}).target is aten.stack.default


def _renamed(ids: np.ndarray, names: dict[int, int]) -> np.ndarray:
    out = np.array(ids)  # a number too, where a term has no lane dimension
    for old, new in names.items():
        out[ids == old] = new
    return out


def is_multi(n: Node) -> bool:
    return isinstance(value(n), (tuple, list))
