"""Evaluates the lanes of nodes by a table of rules; what no rule reads becomes a source."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.mode_states import ModeStates
from megacpp_compile.fx.views import UNIT_DIMS
from megacpp_compile.matchers.rope.lanes import (
    EMPTY,
    MAX_LANES,
    MAX_TERMS,
    Lanes,
    Opaque,
    RuleTable,
    Source,
    Term,
    is_one,
    term,
)

aten = torch.ops.aten
# Table views worth seeing through; anything else (casts, products, cos itself) makes the table it yields.
_SEE_THROUGH = UNIT_DIMS | {
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.repeat_interleave.self_int, aten.slice.Tensor, aten.alias.default, aten.cat.default, aten.neg.default,
}  # fmt: skip


class LaneInterpreter:
    """Evaluates nodes of one graph by `rules`. `activations` are the nodes computed from weights; the others are
    tables. `states`: the modes of the graph's nodes.

    `stops` are nodes to take as sources although they could be interpreted (a head split that looks like a pair split).
    """

    def __init__(
        self, rules: RuleTable, activations: set[Node], states: ModeStates, stops: frozenset[Node] = frozenset()
    ) -> None:
        self.rules, self.activations, self.stops = rules, activations, stops
        self.sources: list[Source] = []
        self._ids: dict[Source, int] = {}
        self._memo: dict[Node, Lanes | None] = {}
        self._opaque: set[Node] = set()
        self._numbering = ValueNumbering(states)
        self._table_views: _TableViews | None = None  # made on first use

    # -- public -------------------------------------------------------------------------------------------------

    def __call__(self, node: Node) -> Lanes | None:
        """The lanes of `node`, or None for a value without a static feature dimension."""
        if node in self._memo:
            return self._memo[node]
        result = None
        if isinstance(value(node), torch.Tensor):
            # Graphs are deep: collect what is needed, then evaluate in graph order, without recursion.
            order, stack = [], [node]
            seen = set(self._memo)
            while stack:
                n = stack.pop()
                if n in seen:
                    continue
                seen.add(n)
                order.append(n)
                if (n.target in self.rules or is_multi(n)) and n not in self.stops and not self.is_table(n):
                    stack.extend(n.all_input_nodes)
            for n in sorted(order):
                self._memo[n] = self._evaluate(n)
            result = self._memo[node]
        return result

    def opaque(self, node: Node) -> bool:
        """Whether `node` was taken as a source rather than interpreted."""
        return node in self._opaque

    def cone(self, root: Node) -> set[Node]:
        """The interpreted nodes `root` is made of, itself included."""
        found, stack = set(), [root]
        while stack:
            n = stack.pop()
            if (
                n in found
                or n not in self.activations
                or self.opaque(n)
                or self._memo.get(n) is None
                and not is_multi(n)
            ):
                continue
            found.add(n)
            if n.target not in EMPTY:  # its argument lends shape and dtype only
                stack.extend(n.all_input_nodes)
        return found

    def source_id(self, source: Source) -> int:
        source = dataclasses.replace(source, node=self._numbering.leader(source.node))
        if source not in self._ids:
            self._ids[source] = len(self.sources)
            self.sources.append(source)
        return self._ids[source]

    def table_view(self, table: Node) -> Lanes | None:
        """The lanes of `table` with the views it is made by resolved."""
        self._table_views = self._table_views or _TableViews(self)
        return self._table_views(table)

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

    def leaf(self, node: Node) -> Lanes | None:
        """`node` as a source: its last dimension is the lanes, or its last two where the last holds pairs."""
        fake = value(node)
        if fake.dim() == 0 or fake.is_complex():
            return None
        sizes = tuple(fake.shape)
        count = 2 if len(sizes) > 2 and isinstance(sizes[-1], int) and sizes[-1] == 2 else 1
        shape = sizes[len(sizes) - count :]
        if not all(isinstance(n, int) for n in shape) or not 2 <= (d := math.prod(shape)) <= MAX_LANES:
            return None
        outer = sizes[: len(sizes) - count]
        dims = tuple(-1 if is_one(n) else i for i, n in enumerate(outer))
        sid = self.source_id(Source(node, dims, tuple(range(len(outer), len(sizes)))))
        entries = term(np.ones(shape), sid, np.arange(d).reshape(shape))
        return Lanes("o" * len(outer) + "l" * count, sizes, [entries])

    def get(self, node: Any) -> Lanes:
        lanes = self._memo.get(node) if isinstance(node, Node) else None
        if lanes is None:
            raise Opaque
        return lanes

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

        def remap(a: np.ndarray) -> np.ndarray:
            out = np.array(a)  # a number too, where a term has no lane dimension
            for k, v in table.items():
                out[a == k] = v
            return out

        return [dataclasses.replace(t, src=remap(t.src), tab=remap(t.tab)) for t in lanes.terms]


class _TableViews(LaneInterpreter):
    """Reads views only, on the sources of the interpreter it serves."""

    def __init__(self, host: LaneInterpreter) -> None:
        super().__init__(host.rules, set(), {})
        self.sources, self._ids, self._numbering = host.sources, host._ids, host._numbering

    def is_table(self, node: Node) -> bool:
        return node.target not in _SEE_THROUGH


class ValueNumbering:
    """Names nodes that compute the same thing alike: `cos.unsqueeze(1)` written twice is one table, the first of them.

    Under different modes nothing is the same: one copy may be rounded or without gradient.
    """

    def __init__(self, states: ModeStates) -> None:
        self.states = states
        self._leader: dict[Node, Node] = {}

    def leader(self, node: Node) -> Node:
        """The first node of the graph that computes what `node` does."""
        if not self._leader:
            firsts: dict[Any, Node] = {}
            for n in self.states:  # in the graph's order
                self._leader[n] = firsts.setdefault(self._hash(n), n)
        return self._leader[node]

    @staticmethod
    def _pure(n: Node) -> bool:
        if n.op != "call_function":
            return False
        if isinstance(n.target, OpOverload):
            tags = n.target.tags
            return torch.Tag.nondeterministic_seeded not in tags and not n.target._schema.is_mutable
        return n.target is operator.getitem

    def _hash(self, n: Node) -> Any:
        if not self._pure(n):
            return id(n)
        names = self._leader
        key = (self.states[n], n.target, _freeze(n.args, names), _freeze(sorted(n.kwargs.items()), names))
        try:
            hash(key)
        except TypeError:
            return id(n)
        return key


def _freeze(x: Any, names: dict[Node, Any]) -> Any:
    if isinstance(x, Node):
        return ("node", id(names[x]))
    if isinstance(x, (list, tuple)):
        return tuple(_freeze(v, names) for v in x)
    if isinstance(x, slice):
        return ("slice", x.start, x.stop, x.step)
    return (type(x).__name__, x)


def is_multi(n: Node) -> bool:
    return isinstance(value(n), (tuple, list))
