"""Finds gated delta rules in a graph by what they compute.

A core (`core.py`) grows from where tokens meet; its operands (`operands.py`) are the values of every token that it is
made of; dimensions tell which is which (`roles.py`); and the subgraph, at small sizes and on random operands, has to
compute the recurrence (`proof.py`). So any spelling is found that is made of ops that `rules.py` can resize, and
nothing that computes something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from functools import partial

import torch
from torch.fx import Graph, Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import called
from megacpp_compile.fx.walks import descendants
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.delta_rule.core import Cores, changed_state, corrects
from megacpp_compile.matchers.delta_rule.norms import unnormed, unscaled
from megacpp_compile.matchers.delta_rule.operands import MOST_OPERANDS, Operands
from megacpp_compile.matchers.delta_rule.proof import proved
from megacpp_compile.matchers.delta_rule.roles import DeltaRuleAxes, Roles, assignments, gate_of
from megacpp_compile.matchers.delta_rule.rules import CLAMPS, RULES
from megacpp_compile.matchers.delta_rule.verdicts import Structure, Verdict, Verdicts
from megacpp_compile.matchers.signs import at_most_zero
from megacpp_compile.matchers.ssd import axes as sizes
from megacpp_compile.matchers.ssd.allowed import join_lengths
from megacpp_compile.matchers.ssd.atoms import flat, number
from megacpp_compile.matchers.ssd.resize import Resized, tensor_dims
from megacpp_compile.matchers.ssd.roles import Leaf
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, lends_shape, tensors
from megacpp_compile.matchers.ssd.trials import best_of, tried

MOST_RESULTS = 6
MOST_MERGED = 3  # q, k and v, whose chunks are few
LONGEST = 1 << 15  # a dimension that a loop has unrolled
SMALL = (2, 3)
ROLES = 3  # the stage of what has not a delta rule's operands
_BENT = "its state goes through {} from step to step, or from chunk to chunk, where only sums and products become of it"


@dataclasses.dataclass
class DeltaRule:
    """A proved delta rule; its operands by role (g, beta and initial_state may lack). `chunk`: tokens of the model's
    chunks, 0 where there are none."""

    o: Leaf
    final_states: list[Leaf]
    operands: dict[str, Leaf]
    scale: float
    qk_norm_eps: float | None
    axes: DeltaRuleAxes
    chunk: int
    inside: set[Node]


@dataclasses.dataclass(frozen=True)
class NoDeltaRule(MatchFailure):
    """Why something that corrects a state is none. `stage`: how far it got, the furthest being the best reason."""

    stage: int = 0


def find_delta_rules(graph: Graph) -> Iterator[DeltaRule | NoDeltaRule]:
    """Every delta rule of `graph`, and a NoDeltaRule for what else solves or corrects as one does, in graph order."""
    cores, verdicts, told = Cores(graph), Verdicts(), set[Node]()
    if any(corrects(nodes) for nodes in cores) and join_lengths(graph):
        cores = Cores(graph)
    for nodes in cores:
        evidence = corrects(nodes)
        if evidence is not None:
            found = _rule_of(cores.algebra, nodes, evidence, verdicts)
            bent = changed_state(cores, set(nodes)) if isinstance(found, NoDeltaRule) else None
            if isinstance(found, NoDeltaRule) and found.stage <= ROLES and bent is not None:
                found = NoDeltaRule(bent, "op", _BENT.format(called(bent).split(".")[0]))
            if bent is None or bent not in told:  # of the same state in another chunk
                yield found
            told |= {found.node} if isinstance(found, NoDeltaRule) else set()


def _rule_of(algebra: Algebra, nodes: list[Node], evidence: Node, verdicts: Verdicts) -> DeltaRule | NoDeltaRule:
    core = set(nodes)
    none = NoDeltaRule(evidence, "no-delta-rule", "corrects a state, but nothing made of it is a delta rule")
    with torch.no_grad():
        found = (_rule_at(algebra, core, root, evidence, verdicts) for root in _results(algebra, nodes, core))
        return best_of(found, none)


def _results(algebra: Algebra, nodes: list[Node], core: Set[Node]) -> list[Node]:
    """What may be the rule's result, the last node first: what leaves the core, and that before gates are applied, or
    before several casts or views."""
    found: dict[Node, None] = {}
    for n in reversed(nodes):
        if all(u in core for u in n.users) and n not in found:
            continue
        found[n] = None
        if len(found) >= MOST_RESULTS:
            break
        while True:
            before = [a for a in tensors(n) if a in core]
            others = [a for a in tensors(n) if a not in core and a not in algebra.constants]
            if len(before) != 1 or n.target in (aten.cat.default, aten.stack.default):
                break
            n = before[0]
            if others or _is_read_as_it_is(algebra, n, core):
                found[n] = None
            if others:
                break
            if not algebra.passes_on(n) and n.target is not aten.slice.Tensor:
                break
    return sorted(found, reverse=True)


def _is_read_as_it_is(algebra: Algebra, n: Node, core: Set[Node]) -> bool:
    """Whether several nodes read `n`, and those of them that are in the core are casts or views."""
    return len(n.users) > 1 and all(u not in core or algebra.passes_on(u) for u in n.users)


def _rule_at(
    algebra: Algebra, core: Set[Node], root: Node, evidence: Node, verdicts: Verdicts
) -> DeltaRule | NoDeltaRule:
    """Pieces that are no more than operands may be operands, as what is split off a projection, or few chunks of one:
    tried in turn."""
    exports = _exports(core, root)

    def rules() -> Iterator[DeltaRule | NoDeltaRule]:
        for merged in range(MOST_MERGED + 1):
            operands = Operands(algebra, core, [root, *exports], merged)
            attempt = partial(_rule_of_operands, algebra, operands, root, exports, evidence, verdicts)
            yield tried(attempt, lambda why: NoDeltaRule(root, "axes", why, 2))
            if not operands.in_pieces:
                return

    return best_of(rules(), NoDeltaRule(root, "", "", -1))


def _rule_of_operands(
    algebra: Algebra, operands: Operands, root: Node, exports: list[Node], evidence: Node, verdicts: Verdicts
) -> DeltaRule | NoDeltaRule:
    if len(operands.leaves) > MOST_OPERANDS:
        return NoDeltaRule(root, "roles", f"it has {len(operands.leaves)} operands, more than a delta rule", 2)
    corrected = algebra.ancestors([evidence], stop=operands.leaves)
    operands.widen({n: unscaled(algebra, n) for n in operands.leaves if n not in corrected})
    exports = [n for n in exports if any(u not in operands.inside and not lends_shape(algebra, u, n) for u in n.users)]
    structure = _structure(algebra, operands, root, exports, corrected)
    verdict = verdicts.get(structure)
    if verdict is not None:
        return _as_before(algebra, operands, root, exports, structure, verdict)
    found, roles = _searched(algebra, operands, root, exports, corrected)
    if isinstance(found, DeltaRule):
        verdict = Verdict({name: structure.place[n] for name, n in roles.items()}, found.scale, apart=operands.apart)
    else:
        verdict = Verdict(None, 1.0, structure.place[found.node], found.tag, found.reason, found.stage)
    verdicts.keep(structure, verdict)
    return found


def _searched(
    algebra: Algebra, operands: Operands, root: Node, exports: list[Node], corrected: Set[Node]
) -> tuple[DeltaRule | NoDeltaRule, dict[str, Node]]:
    """What is proved, and the roles it is proved for. What two loops take apart alike may be two dimensions, or one:
    tried in turn."""
    operands.apart = True
    r = _resized(operands)
    found, roles = _assigned(algebra, operands, r, root, exports, corrected)
    if isinstance(found, NoDeltaRule) and r.axes.kept_apart:
        operands.apart = False
        again, other = _assigned(algebra, operands, _resized(operands), root, exports, corrected)
        if isinstance(again, DeltaRule) or again.stage > found.stage:
            return again, other
    return found, roles


def _assigned(
    algebra: Algebra, operands: Operands, r: Resized, root: Node, exports: list[Node], corrected: Set[Node]
) -> tuple[DeltaRule | NoDeltaRule, dict[str, Node]]:
    gates = gate_of(algebra, r)
    if len(gates) > 1:
        return NoDeltaRule(root, "gates", "decays are made of more than one operand", 3), {}
    best = NoDeltaRule(root, "roles", "its operands have not the dimensions of a delta rule's", 3)
    for roles in assignments(r, root, gates[0] if gates else None, corrected):
        attempt = partial(_proved, algebra, operands, root, exports, roles.nodes)
        found = tried(attempt, lambda why: NoDeltaRule(root, "axes", why, 5))
        if isinstance(found, DeltaRule):
            return found, roles.nodes
        if found.stage > best.stage:
            best = found
    return best, {}


def _structure(
    algebra: Algebra, operands: Operands, root: Node, exports: list[Node], corrected: Set[Node]
) -> Structure:
    """All that the search and the proof look at."""
    normed = {n: unnormed(algebra, n) for n in operands.leaves}
    wider = operands.copy()
    wider.widen(normed)
    norms = [(at.node, at.eps, sorted(at.between)) for at in normed.values()]
    signs = [any(True for _ in _clamps(operands)) and at_most_zero(n) for n in operands.leaves]
    within = [n in corrected for n in operands.leaves]
    marks = root, exports, operands.leaves, within, norms, sorted(operands.inside), signs
    return Structure({*operands.inside, *operands.leaves, *wider.inside, *wider.leaves}, marks)


def _as_before(
    algebra: Algebra, operands: Operands, root: Node, exports: list[Node], structure: Structure, verdict: Verdict
) -> DeltaRule | NoDeltaRule:
    """What the same subgraph was found to be, of these nodes."""
    if verdict.roles is not None:
        nodes = {name: structure.nodes[i] for name, i in verdict.roles.items()}
        operands.apart = verdict.apart
        named = _named(algebra, operands, root, nodes)
        if named is not None:
            return _rule(root, exports, named, verdict.scale)
    return NoDeltaRule(structure.nodes[verdict.node], verdict.tag, verdict.reason, verdict.stage)


def _clamps(operands: Operands) -> Iterator[Node]:
    return (n for n in sorted(operands.inside) if n.target in CLAMPS)


def _resized(operands: Operands) -> Resized:
    return Resized(RULES, sorted(operands.inside), operands.leaves, sizes.AxisEquations(LONGEST, SMALL), operands.apart)


def _exports(core: Set[Node], root: Node) -> list[Node]:
    """What leaves the core beside `root` and what is made of that."""
    beside = core - set(descendants([root], core.__contains__))
    return sorted(n for n in beside if any(u not in core for u in n.users))


@dataclasses.dataclass(frozen=True)
class Named:
    """A subgraph with its dimensions, whose operands have roles; q and k before their norm, where `eps` isn't None."""

    r: Resized
    roles: Roles
    eps: float | None


def _named(algebra: Algebra, operands: Operands, root: Node, nodes: dict[str, Node]) -> Named | None:
    before = [unnormed(algebra, nodes[name]) for name in ("q", "k")]
    eps = before[0].eps if before[0].eps == before[1].eps else None
    if eps is not None:
        operands = operands.copy()
        operands.widen({nodes[name]: at for name, at in zip(("q", "k"), before, strict=True)})
        nodes = {**nodes, "q": before[0].node, "k": before[1].node}
    r = _resized(operands)
    every = assignments(r, root, nodes.get("g"), frozenset())
    return next((Named(r, roles, eps) for roles in every if roles.nodes == nodes), None)


def _proved(
    algebra: Algebra, operands: Operands, root: Node, exports: list[Node], nodes: dict[str, Node]
) -> DeltaRule | NoDeltaRule:
    named = _named(algebra, operands, root, nodes)
    if named is None:
        return NoDeltaRule(root, "roles", "its operands have not the dimensions of a delta rule's", 3)
    clamp = next(_clamps(operands), None)
    if clamp is not None and not at_most_zero(nodes.get("g")):
        return NoDeltaRule(clamp, "gates", "a clamp of sums of gates that are not known to be at most 0", 4)
    proof = proved(named.r, root, exports, named.roles, named.eps)
    if proof is None:
        return NoDeltaRule(root, "differs", "what is computed is no delta rule of its operands", 5)
    scale, wrong = proof
    if wrong is not None:
        return NoDeltaRule(wrong, "escapes", "an intermediate of the delta rule is used elsewhere too", 6)
    return _rule(root, exports, named, scale)


def _rule(root: Node, exports: list[Node], named: Named, scale: float) -> DeltaRule:
    r, roles = named.r, named.roles
    r.fix()
    return DeltaRule(
        r.leaf(root), [*map(r.leaf, exports)], {name: r.leaf(n) for name, n in roles.nodes.items()}, scale, named.eps,
        roles.axes, _chunk(r, roles.axes), set(r.nodes),
    )  # fmt: skip


def _chunk(r: Resized, x: DeltaRuleAxes) -> int:
    """The size of the model's chunks: the tokens' inner dimension, perhaps once they are padded; 0 where unknown. That
    to which a single token is padded is in no operand."""
    if not x.t:
        known = {*x.b, *x.h, *x.k, *x.v}
        own = [a for n in r.nodes for d in tensor_dims(r.dims[n]) for a in flat(d) if a not in known]
        return max((number(a.size) or 0 for a in own), default=0)
    padded = [flat(eq.whole) for eq in r.axes.lengths if [flat(d) for d in eq.parts] == [x.t]]
    size = next((d[-1].size for d in (x.t, *padded) if len(d) > 1), 0)
    return size if isinstance(size, int) else 0

