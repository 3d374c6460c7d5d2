"""Linear attention whose decay no token changes, in chunks or as one triangle: retention (RetNet, arXiv:2307.08621) and
lightning attention (arXiv:2401.04658, MiniMax-01), a scan with a step of one.

    S_t = exp(A) S_t-1 + k_t v_t^T;   o_t = scale * S_t^T q_t,   A one number for each head

Its decays are tables: exponentials, or powers, of a rate times differences of positions, made of `arange` in the graph.
The rate is an operand, as slopes in a buffer are, or made of numbers, or one number. Found and proved as a scan is
(`scan.py`): what a table reaches, run small beside the recurrence. Tables may tell of their sizes in numbers, as
`exp(-rate * 64)` behind a chunk does: what fails at other sizes is tried with positions at their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import argument, same_shape, value
from megacpp_compile.fx.views import EXPANSIONS, SAME_VALUES
from megacpp_compile.fx.walks import made_from, reached
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, pin
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.matchers.ssd.boundary import OperandBoundary
from megacpp_compile.matchers.ssd.constant_rates_proof import POSITIONS, Retention, Trial
from megacpp_compile.matchers.ssd.resize import Resized
from megacpp_compile.matchers.ssd.resize_rules import RULES as SCAN_RULES
from megacpp_compile.matchers.ssd.scan import exports_of
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, tensors
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, EXPONENTIALS, VIEWS, RuleTable, broadcast, rule_table
from megacpp_compile.matchers.ssd.trials import tried
from megacpp_compile.reader.links import through

POWERS = {aten.pow.Tensor_Tensor, aten.pow.Scalar}
FACTORS = {aten.mul.Tensor, aten.pow.Tensor_Tensor}
# What keeps powers of distances finite where a mask forgets them: `decay ** (i - j).clamp(min=0)`.
CLAMPS = {aten.clamp.default, aten.clamp_min.default}
BENDS = CLAMPS | {aten.abs.default, aten.relu.default}
DIFFERENCES = {aten.sub.Tensor, aten.neg.default} | SAME_VALUES | VIEWS | EXPANSIONS
APPLIES = CONTRACTIONS | {aten.mul.Tensor}
LONGEST = 1 << 13  # tokens of a trial that keeps them
SMALL = (2, 3)
MOST_FAILED = 4  # results that are none, of one table
MOST_OPERANDS = 4

_own, rule = rule_table()


@rule(*POWERS, aten.pow.Tensor_Scalar)
def _power(r, n: Node) -> list[Dim]:  # type: ignore[no-untyped-def]
    return broadcast(r, [r.dims[a] for a in n.all_input_nodes])


@rule(*BENDS)
def _bend(r, n: Node) -> list[Dim]:  # type: ignore[no-untyped-def]
    return list(r.dims[n.args[0]])


RULES: RuleTable = {**SCAN_RULES, **_own}


def _bends_at_zero(n: Node) -> bool:
    """Whether `n` is of differences of positions that all begin at 0, and changes its slope where they are 0: at any
    other distance, small trials might not get that far."""
    low, high = argument(n, 1, "min"), argument(n, 2, "max")
    if n.target in CLAMPS and (low != 0 or high is not None):
        return False
    made_of = reached(tensors(n), lambda m: tensors(m) if _is_difference(m) else [])
    return all(_is_difference(m) or m.target is aten.arange.default for m in made_of)


def _is_difference(n: Node) -> bool:
    return n.target in DIFFERENCES and len(tensors(n)) == 1 + (n.target is aten.sub.Tensor)


WHEN = dict.fromkeys(BENDS, _bends_at_zero)


def find_retentions(graph: fx.Graph) -> Iterator[Retention]:
    """Every linear attention of `graph` whose decays are tables of positions."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    if not any(n.target in POSITIONS for n in nodes) or not any(n.target in EXPONENTIALS | POWERS for n in nodes):
        return
    algebra, done = Algebra(graph, RULES, when=WHEN), set[Node]()
    for n in nodes:
        if n in done or not _is_table(algebra, n):
            continue
        failed = 0
        for root in _roots(algebra, algebra.descendants(n, constants=True)):
            if root in done:
                continue
            found = _at(algebra, root)
            failed += found is None
            if found is not None:
                yield found
            if found is not None or failed == MOST_FAILED:
                done |= algebra.ancestors([root], constants=True)
            if failed == MOST_FAILED:
                break


def _is_table(algebra: Algebra, n: Node) -> bool:
    """Whether `n` is an exponential or a power of what is made of positions."""
    if n.target not in EXPONENTIALS | POWERS or n not in algebra.nodes:
        return False
    made_of = algebra.ancestors([n], constants=True)
    if any(m.target in CONTRACTIONS or m.target is aten.cumsum.default for m in made_of):
        return False  # scores, or gates of tokens
    return any(m.target in POSITIONS for m in made_of)


def _roots(algebra: Algebra, ahead: list[Node]) -> list[Node]:
    """What may be the attention's result: the last of what is made of a table, with the views of it that follow."""
    made = [n for n in reversed(ahead) if n not in algebra.constants and isinstance(value(n), Tensor)]
    ends = [n for n in made if len(n.users) != 1 or not all(map(algebra.passes_on, n.users))]
    return [n for n in ends if value(n).dim() > 2]


def _at(algebra: Algebra, root: Node) -> Retention | None:
    everything = algebra.ancestors([root], constants=True)
    tables = sorted(n for n in everything if _is_table(algebra, n))
    for rate in _rates(algebra, tables):
        made_of = set() if rate is None else algebra.ancestors([rate], constants=True)
        own = [n for n in tables if n not in made_of]
        if not own or rate in algebra.constants and not all(rate in _factors(algebra, n) for n in own):
            continue
        with torch.no_grad():
            found = tried(partial(_with_rate, algebra, root, own, rate), lambda why: None)
        if found is not None and not _is_part(algebra, found, own):
            return found
    return None


def _is_part(algebra: Algebra, found: Retention, tables: list[Node]) -> bool:
    """Whether its decays meet its operands elsewhere too, or made its first state, as with a chunk by itself."""
    own = {algebra.source(leaf.node) for leaf in (found.q, found.k, found.v)}
    rate = set() if found.rate is None else algebra.ancestors([found.rate.node], constants=True)
    made_of = [n for n in found.inside | rate if n.target in POSITIONS or n not in algebra.nodes]
    others = {n for m in (*made_of, *tables) for n in algebra.descendants(m, constants=True)}
    others -= found.inside | algebra.constants
    results = {leaf.node for leaf in (found.o, *found.final_states)}
    if found.initial_state is not None and others & algebra.ancestors([found.initial_state.node], constants=True):
        return True
    return any(n.target in APPLIES and own & algebra.ancestors([n], own | results, constants=True) for n in others)


def _rates(algebra: Algebra, tables: list[Node]) -> list[Node | None]:
    """What may be the rate of `tables`."""
    given = set.intersection(*(_without_positions(algebra, n) for n in tables))
    if given:
        return [_unviewed(max(given))]
    return [*sorted(set().union(*(_factors(algebra, n) for n in tables)), reverse=True), None]


def _factors(algebra: Algebra, table: Node) -> set[Node]:
    """What `table` may be a power of, or the exponential of a multiple of."""
    products = [m for m in algebra.ancestors([table], constants=True) if m.target in FACTORS and len(tensors(m)) == 2]
    return {_unviewed(a) for m in products for a in tensors(m)} - {table}


def _unviewed(n: Node) -> Node:
    return through(n, VIEWS, SAME_VALUES, EXPANSIONS)


def _without_positions(algebra: Algebra, table: Node) -> set[Node]:
    """What of a table's operands is no constant, and made of no positions."""
    everything = algebra.ancestors([table], constants=True)
    positions = {n for n in everything if n.target in POSITIONS}
    others = everything - positions - made_from(positions, sorted(everything)) - algebra.constants
    return {n for n in others if isinstance(value(n), Tensor)}


@or_none
def _with_rate(algebra: Algebra, root: Node, tables: list[Node], rate: Node | None) -> Retention | None:
    first = tables[0] if rate is None else rate
    reached = set[Node]().union(*(algebra.descendants(n, constants=True) for n in (*tables, first))) - {rate}
    carrying = (algebra.ancestors([root], constants=True) & reached) - algebra.constants
    boundary = OperandBoundary(algebra, carrying, first)
    operands = [n for n in boundary.leaves(root) if n is not first and n not in algebra.constants]
    operands = [n for n in operands if rate is None or algebra.source(n) is not algebra.source(rate)]
    NoMatch.when(not 2 <= len(operands) <= MOST_OPERANDS)
    leaves = operands if rate is None else [rate, *operands]
    exports, _ = exports_of(algebra, carrying, boundary.inside, leaves, first, root)
    # Tables may serve several layers.
    exports = [n for n in exports if algebra.ancestors([n], operands, constants=True) & {*operands}]
    nodes = sorted(algebra.ancestors([root, *exports], leaves, constants=True) - set(leaves))
    NoMatch.when(any(n not in algebra.nodes and n not in algebra.constants for n in nodes))
    alike = _alike([n for n in nodes if n.target in POSITIONS])
    for tied, pinned in itertools.product((False, True) if alike else (False,), (False, True)):
        try:
            resized = Resized(RULES, nodes, leaves, AxisEquations(LONGEST, SMALL))
            for a, b in alike if tied else ():
                resized.axes.same(*resized.dims[a], *resized.dims[b])
            if pinned:
                pin(d for n in nodes if n.target in POSITIONS for d in resized.dims[n])
            found = Trial(resized, root, tables, rate, operands, exports).found()
        except NoAxes:
            continue
        if found is not None:
            return found
    return None


def _alike(positions: list[Node]) -> list[tuple[Node, Node]]:
    """Pairs of as many positions, as rows and columns of a table have that are each made anew."""
    pairs = itertools.combinations(positions, 2)
    return [(a, b) for a, b in pairs if a.args == b.args and same_shape(a, b)]
