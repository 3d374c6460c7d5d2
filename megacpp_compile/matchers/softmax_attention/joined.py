"""Attention that a model computes part by part, heads in a loop or queries in chunks, as the one attention that it is.

Each part is an attention by itself, and one `cat` or `stack` joins their results. They are one where they differ in
nothing but which heads, or which queries, they are of. What they read is passed as a whole where they are all its
pieces, in order; of heads, it is stacked where not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, same_shape, same_size, value
from megacpp_compile.fx.views import COPIES, FOLDS, PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast, uncast
from megacpp_compile.matchers.latent_attention.core import SDPA
from megacpp_compile.matchers.softmax_attention.conditions import Distance, Hidden
from megacpp_compile.matchers.softmax_attention.parts import Attention, Gain, Groups, Operand, Term, grouped
from megacpp_compile.matchers.softmax_attention.pieces import pieces_of
from megacpp_compile.matchers.softmax_attention.plan import Plan
from megacpp_compile.matchers.softmax_attention.scores import ScoresReader
from megacpp_compile.matchers.ssd.atoms import Atom, NoAxes, fresh, length
from megacpp_compile.matchers.ssd.packed import alike

aten = torch.ops.aten
_JOINS = {aten.cat.default, aten.stack.default}
_VIEWS = COPIES | PERMUTATIONS | UNIT_DIMS | RESHAPES | FOLDS


@dataclasses.dataclass(frozen=True)
class Site:
    """An attention and what the op is told of it. made: what stands in them for tensors that are yet to be made of
    those of its parts, and how; draws: what draws its dropout."""

    attention: Attention
    plan: Plan
    made: Mapping[Node, tuple[Any, tuple[Node, ...], int]] = dataclasses.field(default_factory=dict)
    draws: tuple[Node, ...] = ()

    def inputs(self, nodes: Sequence[Node]) -> list[Node]:
        """`nodes` of the graph, those of parts in place of what is made of them."""
        found = [n for node in nodes for n in (self.inputs(self.made[node][1]) if node in self.made else [node])]
        return list(dict.fromkeys(found))

    def emitted(self, build: Builder) -> tuple[Attention, Plan]:
        """The attention, of tensors that are made in the graph."""
        nodes = dict[Node, Node]()
        for stub, (target, parts, dim) in self.made.items():  # parts before what is made of them
            nodes[stub] = build(target, [nodes.get(part, part) for part in parts], dim)
        return _replaced(self.attention, nodes), _replaced(self.plan, nodes)


def _replaced(given: Any, nodes: Mapping[Node, Node]) -> Any:
    if isinstance(given, Node):
        return nodes.get(given, given)
    if dataclasses.is_dataclass(given):
        parts = {f.name: _replaced(getattr(given, f.name), nodes) for f in dataclasses.fields(given)}
        return dataclasses.replace(given, **parts)  # type: ignore[type-var]
    return tuple(_replaced(one, nodes) for one in given) if isinstance(given, tuple) else given


def joined(sites: Sequence[Site]) -> list[Site]:
    """`sites`, parts of one replaced by it, as often as there are such."""
    left = list(sites)
    while (found := next(_wholes(left), None)) is not None:
        whole, parts = found
        left = [whole if site is parts[0] else site for site in left if site is parts[0] or site not in parts]
    return left


def _wholes(sites: Sequence[Site]) -> Iterator[tuple[Site, list[Site]]]:
    joins: dict[Node, dict[Node, tuple[Site, Groups]]] = {}
    for site in sites:
        if site.attention.softmax.target is not SDPA and (end := _end(site.attention)) is not None:
            join, last, dims = end
            joins.setdefault(join, {})[last] = site, dims
    for join, parts in joins.items():
        entries: Any = join.args[0]
        if not join.kwargs and len(entries) == len(set(entries)) > 1 and all(entry in parts for entry in entries):
            own = [parts[entry] for entry in entries]
            for kind in (Heads,):
                try:
                    whole = kind(join, [s for s, _ in own], [d for _, d in own]).whole()
                except Apart:
                    continue
                yield whole, [s for s, _ in own]
                break


def _end(found: Attention) -> tuple[Node, Node, Groups] | None:
    """(what joins the result with others, as what it joins it, the dimensions of that); None where something else reads
    the result, too."""
    twins = {a: Atom(a.size) for d in found.result_dims for a in d}
    node, dims, casts = found.result, [[twins[a] for a in d] for d in found.result_dims], 0
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target in _JOINS:
            own = {twin: a for a, twin in twins.items()}
            whole = all(twin.parts is None for twin in own)
            return (user, node, tuple(tuple(own[a] for a in d) for d in dims)) if whole else None
        casts += is_cast(user)
        if casts > 1 or not (is_cast(user) or user.target in _VIEWS):
            return None
        try:
            dims = ScoresReader(frozenset()).view(user, dims)
        except NoAxes:
            return None
        node = user
    return None


class Apart(Exception):
    """The parts are not of one attention."""


class Whole:
    """The attention that `sites` are parts of, whose results, of dimensions `ends`, `join` joins."""

    free: tuple[str, ...] = ()  # the roles that parts may have of different sizes

    def __init__(self, join: Node, sites: Sequence[Site], ends: Sequence[Groups]) -> None:
        self.join, self.sites = join, sites
        self.founds = [site.attention for site in sites]
        self.first = next((n for n, f in enumerate(self.founds) if f.queries), 0)
        self.made = {stub: how for site in sites for stub, how in site.made.items()}
        labels = [_labels(found) for found in self.founds]
        known = labels[self.first]
        for own in labels:
            fixed = [role for role in {**own, **known} if role[0] not in self.free]
            self.require(all(r in own and r in known and same_size(own[r].size, known[r].size) for r in fixed))
        self.as_first = [{a: known.get(role, a) for role, a in own.items()} for own in labels]
        self.ends = [self.translated(n, dims) for n, dims in enumerate(ends)]
        self.require(all(_settings(site) == _settings(sites[0]) for site in sites))

    def require(self, holds: bool) -> None:
        if not holds:
            raise Apart

    def translated(self, part: int, dims: Groups) -> Groups:
        """Dimensions of a part as those of the first."""
        known = self.as_first[part]
        self.require(all(a in known for d in dims for a in d))
        return tuple(tuple(known[a] for a in d) for d in dims)

    def slot(self, nodes: Sequence[Node], dims: Sequence[Groups], shared: bool = False) -> tuple[Node, Groups]:
        """(what the whole has for `nodes` of its parts, its dimensions)."""
        raise NotImplementedError

    def made_of(self, target: Any, nodes: Sequence[Node], dim: int) -> Node:
        """What stands for `target` of these nodes."""
        self.require(all(value(n).dtype == value(nodes[0]).dtype for n in nodes))
        stub = fx.Graph().placeholder("made")
        with torch.no_grad():
            stub.meta["val"] = target([value(n) for n in nodes], dim)
        self.made[stub] = target, tuple(nodes), dim
        return stub

    # -- the whole, from its parts

    def operand(self, parts: Sequence[Operand], shared: bool = False) -> Operand:
        node, dims = self.slot([uncast(o.node) for o in parts], [o.dims for o in parts], shared)
        return Operand(node, dims, dims)

    def term(self, nodes: Sequence[Node], terms: Sequence[Term]) -> tuple[Node, Term]:
        node, dims = self.slot(nodes, [t.beside(n) for n, t in zip(nodes, terms, strict=True)])
        return node, dataclasses.replace(terms[0], node=node, dims=dims)

    def hidden(self, parts: Sequence[Hidden]) -> Hidden:
        node, term = self.term([h.node for h in parts], [h.term for h in parts])
        return dataclasses.replace(parts[0], node=node, term=term)

    def added(self, parts: Sequence[tuple[Term, float]]) -> tuple[Term, float]:
        return self.term([t.node for t, _ in parts], [t for t, _ in parts])[1], parts[0][1]

    def gain(self, parts: Sequence[Gain]) -> Gain:
        node, dims = self.slot([g.node for g in parts], [g.dims for g in parts])
        return dataclasses.replace(parts[0], node=node, dims=dims)

    def sinks(self) -> tuple[Node, Groups] | None:
        first = self.founds[0]
        if first.scores.sinks is None or first.scores.sinks[0] is first.softmax:
            return first.scores.sinks
        own = [f.scores.sinks for f in self.founds if f.scores.sinks is not None]
        return self.slot([node for node, _ in own], [dims for _, dims in own])

    def distance(self, side: str) -> Distance | None:
        own = [getattr(site.plan, side) for site in self.sites]
        self.require(all(_same(d, own[0]) for d in own))
        return own[0]  # type: ignore[no-any-return]

    def scores(self) -> dict[str, Any]:
        of = [f.scores for f in self.founds]
        products = [(self.operand([q for q, _, _ in ps]), self.operand([k for _, k, _ in ps], True), ps[0][2])
                    for ps in zip(*(s.products for s in of), strict=True)]  # fmt: skip
        gains = tuple(map(self.gain, zip(*(s.gains for s in of), strict=True)))
        return {"products": tuple(products), "gains": gains, "sinks": self.sinks()}

    def documents(self) -> Hidden | None:
        own = [site.plan.documents for site in self.sites]
        return own[0] and self.hidden([dataclasses.replace(h, node=h.documents) for h in own if h is not None])

    def plan(self) -> Plan:
        plans = [site.plan for site in self.sites]
        documents = self.documents()
        if documents is not None:
            documents = dataclasses.replace(documents, documents=documents.node)
        return dataclasses.replace(
            plans[0], left=self.distance("left"), right=self.distance("right"), documents=documents,
            hidden=tuple(map(self.hidden, zip(*(p.hidden for p in plans), strict=True))),
            added=tuple(map(self.added, zip(*(p.added for p in plans), strict=True))),
        )  # fmt: skip

    def roles(self) -> dict[str, Any]:
        """What the whole has for the dimensions, and its result's."""
        raise NotImplementedError

    def whole(self) -> Site:
        first = self.founds[self.first]
        values = self.operand([f.values for f in self.founds], True)
        scores = dataclasses.replace(first.scores, dims=(), terms=(), **self.scores())
        inside = frozenset(n for f in self.founds for n in (*f.inside, f.result))
        plan = self.plan()
        own = {"inside": inside, "scores": scores, "values": values, "result": self.join, **self.roles()}
        draws = tuple(n for site in self.sites for n in site.draws)
        return Site(dataclasses.replace(first, **own), plan, self.made, draws)


def _labels(found: Attention) -> dict[tuple[str, int], Atom]:
    """The atoms by what they are of."""
    roles = {"batch": found.batch, "groups": found.groups, "heads": found.heads[len(found.groups) :],
             "queries": found.queries, "keys": found.keys, "values": found.value_channels}  # fmt: skip
    roles |= {f"channels {n}": own for n, own in enumerate(found.channels)}
    return {(role, n): a for role, atoms in roles.items() for n, a in enumerate(atoms)}


def _settings(site: Site) -> tuple[Any, ...]:
    """What all parts have in common."""
    scores, plan = site.attention.scores, site.plan
    own = scores.sinks is not None and scores.sinks[0] is not site.attention.softmax
    return (
        [scale for _, _, scale in scores.products], scores.softcap, scores.sinks is None, own, scores.sinks_first,
        [g.divides for g in scores.gains], site.attention.dropout and site.attention.dropout.p, plan.fill, plan.dtype,
        [h.kind for h in plan.hidden], [factor for _, factor in plan.added], plan.documents is None,
        value(site.attention.result).dtype,
    )  # fmt: skip


def _same(a: Distance | None, b: Distance | None) -> bool:
    return a is b if a is None or b is None else same_size(a.size, b.size)


class Heads(Whole):
    """Parts that are heads, or groups of heads. Keys that serve several parts in a row are passed once."""

    def __init__(self, join: Node, sites: Sequence[Site], ends: Sequence[Groups]) -> None:
        super().__init__(join, sites, ends)
        self.require(all(end == self.ends[0] for end in self.ends))
        n, own = len(sites), [[uncast(f.values.node) for f in self.founds]]
        own += [[uncast(f.scores.products[i][1].node) for f in self.founds]
                for i in range(len(self.founds[0].scores.products))]  # fmt: skip
        self.run = next(r for r in range(n, 0, -1) if n % r == 0 and all(_in_runs(nodes, r) for nodes in own))
        self.groups, self.each = (tuple(fresh(m)) for m in (n // self.run, self.run))

    def slot(self, nodes: Sequence[Node], dims: Sequence[Groups], shared: bool = False) -> tuple[Node, Groups]:
        own = [self.translated(n, d) for n, d in enumerate(dims)]
        self.require(all(d == own[0] for d in own) and all(same_shape(n, nodes[0]) for n in nodes))
        if _in_runs(nodes, len(nodes)):
            return nodes[0], own[0]
        atoms = (*self.groups, *self.each)
        if shared and self.groups and _in_runs(nodes, self.run):
            nodes, atoms = nodes[:: self.run], self.groups
        for piece in pieces_of(nodes[0], own[0]):
            if (dim := _counted(piece.node, [pieces_of(n, own[0]) for n in nodes])) is not None:
                rest = piece.dims[dim]
                return piece.node, (*piece.dims[:dim], (*atoms, *rest), *piece.dims[dim + 1 :])
        nodes, of_each = _bases(nodes, own[0])
        return self.made_of(aten.stack.default, nodes, 0), (atoms, *of_each)

    def documents(self) -> Hidden | None:
        found = super().documents()
        self.require(found is None or not set(self.groups + self.each) & {a for d in found.term.dims for a in d})
        return found

    def roles(self) -> dict[str, Any]:
        first, new, dims = self.founds[0], (*self.groups, *self.each), self.ends[0]
        dim: Any = self.join.args[1] if len(self.join.args) > 1 else 0
        dim %= value(self.join).dim()
        stacked = self.join.target is aten.stack.default
        result = (*dims[:dim], new, *dims[dim:]) if stacked else (*dims[:dim], new + dims[dim], *dims[dim + 1 :])
        groups = (*self.groups, *first.groups)
        heads = (*groups, *self.each, *first.heads[len(first.groups) :])
        return {"result_dims": grouped(result), "groups": groups, "heads": heads}


def _in_runs(nodes: Sequence[Node], length: int) -> bool:
    """Whether each so many `nodes` are one value."""
    return all(alike(n, nodes[i // length * length]) for i, n in enumerate(nodes))


def _bases(nodes: Sequence[Node], dims: Groups) -> tuple[Sequence[Node], Groups]:
    """What `nodes` are views of, and their dimensions, so that those of the last are the inner ones in memory."""
    for level in zip(*(reversed(pieces_of(n, dims)) for n in nodes), strict=False):
        if all(p.dims == level[0].dims and not any(s is not None for s in p.starts) for p in level):
            return [p.node for p in level], level[0].dims
    return nodes, dims


def _counted(base: Node, parts: Sequence[Any]) -> int | None:
    """The dimension of `base` of which each part in turn is the next piece, all of the same size."""
    found = [next((p for p in pieces if alike(p.node, base)), None) for pieces in parts]
    if any(p is None for p in found):
        return None
    cut = [[d for d, start in enumerate(p.starts) if start is not None] for p in found]  # type: ignore[union-attr]
    if any(len(c) != 1 or c != cut[0] for c in cut) or any(p.dims != found[0].dims for p in found):  # type: ignore[union-attr]
        return None
    dim, size = cut[0][0], value(base).shape[cut[0][0]]
    one = length([*found[0].dims[dim]])  # type: ignore[union-attr]
    in_order = all(p.starts[dim] == n * one for n, p in enumerate(found))  # type: ignore[union-attr]
    return dim if in_order and same_size(size, one * len(parts)) else None
