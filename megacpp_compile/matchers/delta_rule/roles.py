"""Which operand of a core is which, by the dimensions that they share with each other and with the result."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Set

from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.walks import reached
from megacpp_compile.matchers.ssd.atoms import Atom, Dim, flat
from megacpp_compile.matchers.ssd.resize import Resized, tensor_dims
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra
from megacpp_compile.matchers.ssd.tensor_ops import EXPONENTIALS

ROLES = ("q", "k", "v", "beta", "initial_state")


@dataclasses.dataclass(frozen=True)
class DeltaRuleAxes:
    """Atoms of the dimensions: b batch, t tokens (none of a single one), h value heads, k and v channels."""

    b: Dim
    t: Dim
    h: Dim
    k: Dim
    v: Dim


@dataclasses.dataclass(frozen=True)
class Roles:
    """The operand of each role, and the dimensions they have."""

    nodes: dict[str, Node]
    axes: DeltaRuleAxes


def gate_of(algebra: Algebra, resized: Resized) -> list[Node]:
    """The leaves that exponentials are made of: one, or none without gates."""
    inside = set(resized.nodes)
    exponents = {n for n in inside if n.target in EXPONENTIALS and n not in algebra.constants}
    found = set(reached(exponents, lambda n: algebra.inputs(n) if n in inside else []))
    return [n for n in resized.leaves if n in found]


def assignments(r: Resized, root: Node, gate: Node | None, corrected: Set[Node]) -> Iterator[Roles]:
    """Every way to name the leaves that dimensions allow. corrected: what the state is made of, so no queries."""
    made = r.atoms(root)
    others = [n for n in r.leaves if n is not gate]
    for names in itertools.permutations(ROLES, len(others)):
        nodes = dict(zip(names, others, strict=True))
        if not {"k", "v"} <= nodes.keys() or nodes.get("q") in corrected:
            continue
        nodes.setdefault("q", nodes["k"])  # one tensor as both
        if gate is not None:
            nodes["g"] = gate
        axes = _axes(r, made, nodes)
        if axes is not None:
            yield Roles(nodes, axes)


@or_none
def _axes(r: Resized, made: Dim, nodes: dict[str, Node]) -> DeltaRuleAxes | None:
    of = {name: set(r.atoms(n)) for name, n in nodes.items()}
    NoMatch.when(any(len(r.atoms(n)) != len(of[name]) for name, n in nodes.items()) or len(set(made)) != len(made))
    known = set(made)
    keys = of["k"] - known
    NoMatch.when(not keys or of["q"] - known != keys or of["v"] != known)
    elsewhere = set().union(*(of[name] for name in ("q", "k", "g", "beta") if name in of))
    own = [d for d in r.of(nodes["v"]) if d and not set(d) & elsewhere]
    NoMatch.when(not own)
    values = own[-1]
    outer = known - set(values)
    NoMatch.when(any(of[name] - keys - outer for name in ("q", "k") if name in of) or of.get("beta", set()) - outer)
    NoMatch.when(of.get("g", set()) - keys - outer)
    NoMatch.when("initial_state" in of and (not keys | set(values) >= of["initial_state"] - outer))
    time = _time(r, outer, keys, set(values))
    NoMatch.when("initial_state" in of and of["initial_state"] & time)
    dims = [d for d in r.of(nodes["v"]) if d != values and not set(d) & time]
    order = r.atoms(nodes["v"])
    heads = [a for d in (dims[1:] or dims) for a in d]
    return DeltaRuleAxes(
        b=[a for a in order if a in outer - time and a not in heads], t=[a for a in order if a in time], h=heads,
        k=[a for a in r.atoms(nodes["k"]) if a in keys], v=values,
    )  # fmt: skip


def _time(r: Resized, outer: Set[Atom], keys: Set[Atom], values: Set[Atom]) -> Set[Atom]:
    """The dimensions that a state, which has those of keys and of values, has not; or those that meet themselves. None
    for a single token."""
    least: set[Atom] | None = None
    twice = set[Atom]()
    for dims in r.dims.values():
        mine = [a for d in tensor_dims(dims) for a in flat(d)]
        twice |= {a for a in mine if a in outer and mine.count(a) > 1}
        if keys | values <= set(mine):
            rest = set(mine) & outer
            least = rest if least is None or len(rest) < len(least) else least
    if least is not None and outer - least:
        return outer - least
    return twice
