"""Mamba-2's chunked scan (state-space dual, arXiv:2405.21060), found by what it computes.

    state_t = exp(dt_t * A) * state_{t-1} + dt_t * outer(x_t, B_t);    y_t = state_t @ C_t + D * x_t

People write it as broadcast products, einsums, batched products, with segment sums or differences of prefix sums, with
loops over chunks, padded or not. What they share is decays: exponentials of sums of `dt * A` over consecutive
positions. From a decay the subgraph is grown to a candidate for y; its leaves get roles by the dimensions they have;
and then it is run at small sizes on random operands beside the recurrence above (`resize.py`). What agrees there is
the scan, however it is written; what does not is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import argument, value
from megacpp_compile.matchers.ssd.allowed import join_lengths
from megacpp_compile.matchers.ssd.atoms import is_one
from megacpp_compile.matchers.ssd.boundary import MOST_OPERANDS, OperandBoundary
from megacpp_compile.matchers.ssd.packed import Masks, alike
from megacpp_compile.matchers.ssd.resize import Resized
from megacpp_compile.matchers.ssd.resize_rules import RULES
from megacpp_compile.matchers.ssd.roles import Leaf, NoScan, Roles, Scan
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, constants_of, lends_shape, operand_of, tensors
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, EXPONENTIALS
from megacpp_compile.matchers.ssd.trials import best_of, tried

__all__ = ["Leaf", "NoScan", "Scan", "find_packed_scans", "find_scans"]

Found = TypeVar("Found")
MOST_CANDIDATES = 40


def find_scans(graph: fx.Graph) -> Iterator[Scan | NoScan]:
    """Every scan of `graph`, and a NoScan for everything else with a scan's decays, in graph order."""
    yield from found_at_decays(graph, _scan_of)


def find_packed_scans(graph: fx.Graph, known: set[Node]) -> Iterator[Scan | NoScan]:
    """As `find_scans`, of scans that start anew with packed documents, and of what is no such scan; among the nodes
    `known` there is none."""
    known, others = set(known), list[NoScan]()
    for deep in (True, False):
        for found in found_at_decays(graph, _scan_of, Masks(deep), known):
            if isinstance(found, NoScan):
                others.append(found)
            elif found.documents is not None:
                known |= found.inside
                yield found
    yield from (other for other in others if not other.decays & known)


def found_at_decays(
    graph: fx.Graph, find: Callable[[Algebra, Node], Found], masks: Masks | None = None, known: Iterable[Node] = ()
) -> Iterator[Found]:
    """`find` of each decay of `graph` that nothing found before took part in, in graph order; with `masks`, of those in
    what masks are applied to. Where no scan is found from a decay, its match has no `inside`, and its descendants with
    their exponentials count as visited."""
    if not any(n.target in EXPONENTIALS for n in graph.nodes):
        return
    algebra = Algebra(graph, RULES, masks)
    if masks is not None and not any(algebra.is_mask(a) for n in algebra.nodes for a in tensors(n)):
        return
    done, joined = set(known), False
    for n in graph.nodes:
        if n in done or not is_decay(algebra, n) or masks is not None and not _masked(algebra, n):
            continue
        if not joined and join_lengths(graph):
            algebra = Algebra(graph, RULES, masks)
        joined = True
        found = find(algebra, n)
        if (inside := getattr(found, "inside", None)) is not None:
            done |= inside
        else:
            done |= set(algebra.descendants(n))
            done |= {e for a in algebra.descendants(n) for e in algebra.ancestors([a]) if e.target in EXPONENTIALS}
        yield found


def is_decay(algebra: Algebra, n: Node) -> bool:
    """An exponential of sums over consecutive positions, of which there are several."""
    if n.target not in EXPONENTIALS or n not in algebra.nodes or n in algebra.constants:
        return False
    made_of = algebra.ancestors([n])
    if any(m.target is aten.cumsum.default and not is_one(value(m).shape[argument(m, 1, "dim")]) for m in made_of):
        return True
    return any(m.target in CONTRACTIONS and set(tensors(m)) & algebra.constants for m in made_of)


def _masked(algebra: Algebra, decay: Node) -> bool:
    """Whether a mask is applied in what `decay` is part of."""
    return any(algebra.is_mask(a) for n in algebra.ancestors(algebra.descendants(decay)) for a in tensors(n))


def candidates(algebra: Algebra, decay: Node) -> list[Node]:
    """What may be the result that `decay` is part of, the last node first."""
    ahead = [n for n in algebra.descendants(decay) if isinstance(value(n), torch.Tensor) and value(n).dim() > 1]
    return list(reversed(ahead))[-MOST_CANDIDATES:]


def _scan_of(algebra: Algebra, decay: Node) -> Scan | NoScan:
    """The scan that `decay` is part of: the last node in which everything it is made of is one."""
    none = NoScan(decay, "no-scan", "decays over consecutive positions, but nothing made of them is a scan")
    with torch.no_grad():
        best = best_of((_tried_at(algebra, root, decay) for root in candidates(algebra, decay)), none)
    if isinstance(best, Scan):
        return best
    others = algebra.ancestors(algebra.descendants(decay)) if algebra.masks is not None else ()
    return dataclasses.replace(best, decays=frozenset([decay, *(n for n in others if is_decay(algebra, n))]))


def _tried_at(algebra: Algebra, root: Node, decay: Node) -> Scan | NoScan:
    return tried(lambda: _scan_at(algebra, root, decay), lambda why: NoScan(root, "axes", why, 2))


def _scan_at(algebra: Algebra, root: Node, decay: Node) -> Scan | NoScan:
    everything = algebra.ancestors([root])
    decays = [n for n in everything if is_decay(algebra, n)]
    exponents = algebra.ancestors(a for e in decays for a in algebra.inputs(e))
    added = algebra.ancestors([root], stop=decays)
    shared = [n for n in exponents & added if n not in algebra.constants]
    if not shared:
        return NoScan(decay, "no-step", "what the state takes in is not multiplied by the step of its decay", 1)
    dt = max(shared)
    dt, steps = operand_of(algebra, dt)
    carrying = algebra.ancestors([root], stop=[dt]) & set(algebra.descendants(dt)) - {dt}
    boundary = OperandBoundary(algebra, carrying, dt)
    boundary.inside |= steps
    leaves = boundary.leaves(root)
    rates = [n for n in leaves if n in boundary.from_exponents(decays) and n is not dt]
    if len(rates) != 1:
        return NoScan(decay, "rate", f"the logarithm of the decay is a step times {len(rates) or 'no'} rates", 2)
    operands = [n for n in leaves if n not in (dt, rates[0])]
    if len(operands) > MOST_OPERANDS - 2:
        return NoScan(root, "roles", "it has more operands than a scan", 2)
    documents = list(boundary.documents)
    if not all(alike(documents[0], other) for other in documents[1:]):
        return NoScan(root, "documents", "what tells its documents apart are several tensors", 2)
    exports, shown = exports_of(algebra, carrying, boundary.inside, [*leaves, *documents], dt, root)
    resized = Resized(RULES, sorted(boundary.inside | shown), [dt, *operands, rates[0], *documents])
    return Roles(algebra, resized, root, dt, rates[0], operands, exports, documents).scan()


def exports_of(
    algebra: Algebra, carrying: set[Node], inside: set[Node], operands: list[Node], dt: Node, root: Node
) -> tuple[list[Node], set[Node]]:
    """(the values read outside the scan beside y, the nodes that compute them); they have to be its final state."""
    known, shown = inside | set(operands) | algebra.constants, set[Node]()
    for n in sorted({a for o in operands for a in algebra.descendants(o)} - known):
        if root not in n.all_input_nodes and set(tensors(n)) <= known | shown:
            shown.add(n)
    exports = []
    made = {a for n in carrying if algebra.source(n) is not algebra.source(dt) for a in algebra.descendants(n)}
    for n in sorted((carrying | shown) & made - {root}):
        if any(u not in inside and u not in shown and not lends_shape(algebra, u, n) for u in n.users):
            exports.append(n)
    shown &= algebra.ancestors(exports)
    return exports, shown | {c for n in shown for a in tensors(n) for c in constants_of(algebra, a)}
