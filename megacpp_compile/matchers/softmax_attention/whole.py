"""The one attention that several are parts of: these differ in nothing but which heads or which queries they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.views import uncast
from megacpp_compile.matchers.softmax_attention.conditions import Distance, Hidden
from megacpp_compile.matchers.softmax_attention.parts import Attention, Gain, Groups, Operand, Term
from megacpp_compile.matchers.softmax_attention.plan import Plan
from megacpp_compile.matchers.softmax_attention.prefixes import Prefix
from megacpp_compile.matchers.ssd.atoms import Atom
from megacpp_compile.matchers.ssd.packed import alike

# From what emits a node, or computes its value, and those of a tensor's parts to the tensor.
Make = Callable[[Callable[..., Any], list[Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """An attention and what the op is told of it. made: what stands in them for tensors that are yet to be made of
    those of its parts, and how; draws: what draws its dropout."""

    attention: Attention
    plan: Plan
    made: Mapping[Node, tuple[Make, tuple[Node, ...]]] = dataclasses.field(default_factory=dict)
    draws: tuple[Node, ...] = ()

    def inputs(self, nodes: Sequence[Node]) -> list[Node]:
        """`nodes` of the graph, those of parts in place of what is made of them."""
        found = [n for node in nodes for n in (self.inputs(self.made[node][1]) if node in self.made else [node])]
        return list(dict.fromkeys(found))

    def emitted(self, build: Builder) -> tuple[Attention, Plan]:
        """The attention, of tensors that are made in the graph."""
        nodes = dict[Node, Node]()
        for stub, (make, parts) in self.made.items():  # parts before what is made of them
            nodes[stub] = make(build, [nodes.get(part, part) for part in parts])
        return _replaced(self.attention, nodes), _replaced(self.plan, nodes)


def _replaced(given: Any, nodes: Mapping[Node, Node]) -> Any:
    if isinstance(given, Node):
        return nodes.get(given, given)
    if dataclasses.is_dataclass(given):
        parts = {f.name: _replaced(getattr(given, f.name), nodes) for f in dataclasses.fields(given)}
        return dataclasses.replace(given, **parts)  # type: ignore[type-var]
    return tuple(_replaced(one, nodes) for one in given) if isinstance(given, tuple) else given


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

    def made_of(self, make: Make, nodes: Sequence[Node]) -> Node:
        """What stands for what `make` makes of `nodes`."""
        self.require(all(value(n).dtype == value(nodes[0]).dtype for n in nodes))
        stub = fx.Graph().placeholder("made")
        with torch.no_grad():
            stub.meta["val"] = make(lambda target, *args: target(*args), [value(n) for n in nodes])
        self.made[stub] = make, tuple(nodes)
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
        self.require(all(same_distance(d, own[0]) for d in own))
        return own[0]  # type: ignore[no-any-return]

    def scores(self) -> dict[str, Any]:
        of = [f.scores for f in self.founds]
        products = [(self.operand([q for q, _, _ in ps]), self.operand([k for _, k, _ in ps], True), ps[0][2])
                    for ps in zip(*(s.products for s in of), strict=True)]  # fmt: skip
        gains = tuple(map(self.gain, zip(*(s.gains for s in of), strict=True)))
        return {"products": tuple(products), "gains": gains, "sinks": self.sinks()}

    def documents(self) -> tuple[Hidden, ...]:
        own = zip(*(site.plan.documents for site in self.sites), strict=True)
        whole = (self.hidden([dataclasses.replace(h, node=h.documents) for h in parts]) for parts in own)
        return tuple(dataclasses.replace(h, documents=h.node) for h in whole)

    def prefix(self) -> Prefix | None:
        own = [(site.plan.prefix, n) for n, site in enumerate(self.sites)]
        told = [p and (p.number, p.node, self.translated(n, p.dims)) for p, n in own]
        self.require(all(alike(one, told[0]) for one in told))
        return self.sites[self.first].plan.prefix

    def plan(self) -> Plan:
        plans = [site.plan for site in self.sites]
        return dataclasses.replace(
            plans[0], left=self.distance("left"), right=self.distance("right"), documents=self.documents(),
            prefix=self.prefix(), hidden=tuple(map(self.hidden, zip(*(p.hidden for p in plans), strict=True))),
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
        [h.kind for h in plan.hidden], [factor for _, factor in plan.added], len(plan.documents),
        value(site.attention.result).dtype, site.attention.result.meta.get("ac_graph_id"),
    )  # fmt: skip


def same_distance(a: Distance | None, b: Distance | None) -> bool:
    return a is b if a is None or b is None else same_size(a.size, b.size)
