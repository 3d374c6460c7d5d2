"""What one step of a loop computes, told by running it small, beside the recurrences that have an op:

    S' = diag(exp g) S + k u^T;   o = scale * S'^T q;   u = beta (v - (diag(exp g) S)^T k), or beta v, or v alone

Linear attention is the others, with a gate for each head, each channel of the keys, or a rate that no token changes
(arXiv:2006.16236, 2312.06635, 2307.08621); the first corrects what the state itself predicts (arXiv:2412.06464,
2510.26692). As all of a step is sums, products and exponentials of its operands, two that agree on random operands are
the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import called, long_dimensions, value
from megacpp_compile.fx.walks import made_from
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if
from megacpp_compile.matchers.ssd.atoms import Atom, Dim
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.matchers.ssd.resize import Resized, agree
from megacpp_compile.matchers.ssd.resize_rules import RULES
from megacpp_compile.matchers.ssd.roles import Leaf, arranged
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra
from megacpp_compile.matchers.ssd.trials import tried
from megacpp_compile.matchers.token_loops import resets
from megacpp_compile.matchers.token_loops.fronts import last_token, tokens_of
from megacpp_compile.matchers.token_loops.last_step import LastStep, of_state
from megacpp_compile.matchers.token_loops.loops import Loop
from megacpp_compile.matchers.token_loops.scans import LONGEST, ScanStep
from megacpp_compile.matchers.token_loops.steps import find_loops

TOLERANCE = 1e-10  # float64, one step
MOST_OPERANDS = 6
DIFFERS = "differs"
ROLES = ("q", "k", "v", "g", "beta")
Dims = tuple[tuple[object, ...], ...]


@dataclasses.dataclass
class TokenLoop:
    """A proved loop. operands: q, k, v, and perhaps g and beta; of a scan x, dt, A, B, C, and perhaps D. They are nodes
    of the last step, or whole tensors, which have one of the atoms `tokens`.

    delta: whether the state is corrected by what it predicts; without it, beta is what values are multiplied by.
    decay: g is the decay itself, not its logarithm. rate: a number that states are multiplied by, without gates.
    rates: of a scan, A has one for each channel and state, Mamba-1's.
    inside: the last step and what is made in front of the loop.
    Atoms: b batch, h heads, k channels of keys (states of a scan), v of values.
    """

    loop: Loop
    operands: dict[str, Leaf]
    delta: bool
    decay: bool
    scale: float
    output: Leaf
    initial: Leaf
    b: Dim
    h: Dim
    k: Dim
    v: Dim
    inside: set[Node]
    scan: bool = False
    rates: bool = False
    tokens: frozenset[Atom] = frozenset()
    rate: float = 1.0


def find_token_loops(graph: fx.Graph) -> Iterator[TokenLoop | MatchFailure]:
    """Every loop of `graph` that is a delta rule or a linear attention, and what looks like one and is none."""
    algebra: Algebra | None = None
    for loop in find_loops(graph):
        if isinstance(loop, MatchFailure):
            if value(loop.node).dim() > 2:
                yield loop
            continue
        loop.fix()
        algebra = algebra or Algebra(graph, RULES)
        with torch.no_grad():
            found = _told(algebra, loop)
        if loop.others and not isinstance(found, TokenLoop):
            found = _beside_others(loop)
        if found is None or loop.wide and isinstance(found, MatchFailure) and found.tag != DIFFERS:
            sources = [loop.reads[n].source for n in loop.taken() if n in loop.reads]
            found = MatchFailure(loop.output, *resets.DECAYS) if resets.cleared_in_front(sources) else found
        told = isinstance(found, MatchFailure) and (not loop.wide or found.tag in (DIFFERS, resets.DECAYS[0]))
        if found is not None and (told or isinstance(found, TokenLoop)):
            yield found  # what is read of chunks' states and the like is nobody's loop over tokens


def _beside_others(loop: Loop) -> MatchFailure | None:
    """A loop that is none which hands on more than its state, by the largest of what it hands on."""
    most = max(map(long_dimensions, loop.others))
    if value(loop.entering).dim() <= 2 or long_dimensions(loop.entering) <= most:
        return None
    names = ", ".join(n.name for n in sorted(loop.others) if n in loop.alike[-1])
    return MatchFailure(loop.output, "carried", f"each step hands on more than its state: {names}")


def _told(algebra: Algebra, loop: Loop) -> TokenLoop | MatchFailure | None:
    """What `loop` is, with all that its steps collect or, where that is none, up to what they read of the state."""
    found = _tried(algebra, loop)
    if isinstance(found, TokenLoop) or (read := _read_of_state(loop)) is None:
        return found
    other = _tried(algebra, dataclasses.replace(loop, read=read))
    nearer = isinstance(found, MatchFailure) and found.tag != DIFFERS and other is not None
    return other if isinstance(other, TokenLoop) or nearer else found


def _tried(algebra: Algebra, loop: Loop) -> TokenLoop | MatchFailure | None:
    scan = None if loop.others else _scan(algebra, loop)
    if isinstance(scan, TokenLoop):
        return scan
    no_axes = partial(MatchFailure, loop.output, "axes")
    first = tried(partial(_proved, algebra, loop, False), no_axes)
    other = first if isinstance(first, TokenLoop) else tried(partial(_proved, algebra, loop, True), no_axes)
    return other if isinstance(other, TokenLoop) else scan or first


def _read_of_state(loop: Loop) -> Node | None:
    """The first node, smaller than a state, by which alone the state reaches the output, where that is another."""
    own = sorted(of_state(loop))
    for read in (n for n in own if isinstance(value(n), Tensor)):
        if read is loop.output or long_dimensions(read) >= long_dimensions(loop.entering):
            continue
        if loop.output not in made_from([loop.entering], (n for n in own if n is not read)):
            return read
    return None


@or_none
def _scan(algebra: Algebra, loop: Loop) -> TokenLoop | MatchFailure | None:
    step = NoMatch.unless(tried(partial(ScanStep, algebra, loop), lambda why: None))
    if not step.roles:
        reason = "a step has a scan's operands and is not Mamba's: S' = exp(dt A) S + dt x B^T, y = S' C + D x"
        return MatchFailure(loop.output, DIFFERS, reason) if step.tried else None
    step.r.fix()
    output, entering, *operands = map(step.r.leaf, (loop.output, loop.entering, *step.roles.values()))
    return TokenLoop(
        loop, dict(zip(step.roles, operands, strict=True)), False, False, 1.0, output, entering, step.b, step.h, step.n,
        step.p, set(step.r.nodes), True, bool(step.rates), frozenset(step.t),
    )  # fmt: skip


@or_failure
@or_none
def _proved(algebra: Algebra, loop: Loop, whole: bool) -> TokenLoop | MatchFailure | None:
    step = LastStep(algebra, loop, whole)
    NoMatch.when(whole and not step.taken_whole)
    NoMatch.when(value(loop.entering).dim() < 2 or len(step.leaves) > MOST_OPERANDS)
    if step.strange is not None:
        refuse_if(resets.clears(step.strange), step.strange, *resets.STATE)
        reason = f"what becomes of the state is more than sums and products ({called(step.strange).split('.')[0]})"
        refused = MatchFailure(step.strange, "op", reason)
        return refused if step.outer else None
    leaves = [loop.entering, *step.leaves, *step.again]
    resized = Resized(RULES, sorted(step.inside - set(leaves)), leaves, AxisEquations(LONGEST))
    for n, leaf in step.again.items():
        for one, other in zip(resized.dims[n], resized.dims[leaf], strict=True):
            resized.axes.same(one, other)
    tokens = tokens_of(resized, loop)
    found = None if tokens is None else _Roles(loop, step, resized, tokens).found()
    cleared = not isinstance(found, TokenLoop) and any(map(resets.clears, step.own))
    return MatchFailure(loop.output, *resets.STATE) if cleared else found


class _Roles:
    """Which leaf is which operand: by atoms where they tell, by trial where they do not."""

    def __init__(self, loop: Loop, step: LastStep, resized: Resized, tokens: set[Atom]) -> None:
        self.loop, self.step, self.r, self.tokens = loop, step, resized, tokens
        self.next = loop.states[-1]

    def atoms(self, n: Node) -> Dim:
        return [a for d in self.r.of(n) for a in d if a not in self.tokens]

    def found(self) -> TokenLoop | MatchFailure | None:
        loop = self.loop
        state = self.atoms(loop.entering)
        sets = [set(self.atoms(n)) for n in (*self.step.leaves, self.next, loop.output)]
        if len(set(state)) != len(state) and self.step.outer:
            reason = "rows and columns of its state are the same channels, as of a product of an operand with itself"
            return MatchFailure(loop.output, "roles", reason)
        if len(set(state)) != len(state) or any(s - set(state) for s in sets) or sets[-2] != set(state):
            return None
        tried = False
        for roles in self._assignments():
            tried = True
            for delta, decay in itertools.product((True, False), (False, True) if "g" in roles else (False,)):
                numbers = self._numbers(roles, delta, decay)
                if numbers is not None:
                    return self._made(roles, delta, decay, *numbers)
        if not tried:
            wanted = "a query, a key and a value of each token, with a gate of heads or of the key's channels"
            return MatchFailure(loop.output, "roles", f"its operands are not {wanted}") if self.step.outer else None
        return MatchFailure(loop.output, DIFFERS, "a step is neither the delta rule nor linear attention")

    def _assignments(self) -> Iterator[dict[str, Node]]:
        leaves = self.step.leaves
        state, out = set(self.atoms(self.loop.entering)), set(self.atoms(self.loop.output))
        for names in itertools.permutations(ROLES, len(leaves)):
            roles = dict(zip(names, leaves, strict=True))
            if not {"k", "v"} <= roles.keys():
                continue
            roles.setdefault("q", roles["k"])
            q, k, v = (set(self.atoms(roles[name])) for name in ("q", "k", "v"))
            keys = state - out
            if not keys or not self._values(roles) or not keys <= k & q or keys & v:
                continue
            if "beta" in roles and set(self.atoms(roles["beta"])) & keys:
                continue
            yield roles

    def _values(self, roles: dict[str, Node]) -> Dim:
        """The channels of values: atoms of the output that no other operand has."""
        out = set(self.atoms(self.loop.output)) & set(self.atoms(roles["v"]))
        others = {a for name, n in roles.items() if name != "v" for a in self.atoms(n)}
        return [a for a in self.atoms(self.loop.entering) if a in out - others]

    def _dims(self, roles: dict[str, Node]) -> tuple[Dim, Dim, Dim, Dim]:
        state, out = self.atoms(self.loop.entering), set(self.atoms(self.loop.output))
        keys = [a for a in state if a not in out]
        values = self._values(roles)
        rest = [a for a in state if a not in keys and a not in values]
        first = self.r.of(self.loop.entering)[0] if value(self.loop.entering).dim() > 3 else []
        b = first if set(first) <= set(rest) else []
        return b, [a for a in rest if a not in b], keys, values

    @or_none
    def _numbers(self, roles: dict[str, Node], delta: bool, decay: bool) -> tuple[float, float] | None:
        """What o is multiplied by, and the state of an attention without gates, where the step is the recurrence
        otherwise."""
        r, found = self.r, []
        b, h, k, v = self._dims(roles)
        for turn in (0, 1):
            r.solve(turn)
            leaves = r.draw(turn)
            leaves |= {n: leaves[leaf] for n, leaf in self.step.again.items()}
            out, behind = r.run(leaves, [self.loop.output, self.next])
            targets = {"q": [b, h, k], "k": [b, h, k], "v": [b, h, v], "g": [b, h, k], "beta": [b, h]}
            given = {name: last_token(r, leaves[n], n, targets[name], self.tokens) for name, n in roles.items()}
            before = arranged(r.axes, leaves[self.loop.entering], r.of(self.loop.entering), [b, h, k, v])
            got, rate = arranged(r.axes, behind, r.of(self.next), [b, h, k, v]), 1.0
            if not delta and "g" not in roles:
                added = step(0 * before, **given, delta=False, decay=False)[1]
                rate = float((before * (got - added)).sum() / (before * before).sum())
                rate = 1.0 if abs(rate - 1) <= TOLERANCE else rate
            want, state = step(rate * before, **given, delta=delta, decay=decay)
            o = arranged(r.axes, out, r.of(self.loop.output), [b, h, v])
            NoMatch.when(rate <= 0 or not agree(got, state, TOLERANCE))
            scale = float((o * want).sum() / (want * want).sum())
            NoMatch.when(scale == 0 or not agree(o, scale * want, TOLERANCE))
            found.append((scale, rate))
        same = all(abs(a - b) <= TOLERANCE * abs(a) for a, b in zip(*found, strict=True))
        return found[0] if same else None

    def _made(self, roles: dict[str, Node], delta: bool, decay: bool, scale: float, rate: float) -> TokenLoop:
        b, h, k, v = self._dims(roles)
        self.r.fix()
        return TokenLoop(
            self.loop, {name: self.r.leaf(n) for name, n in roles.items()}, delta, decay, scale,
            self.r.leaf(self.loop.output), self.r.leaf(self.loop.entering), b, h, k, v,
            set(self.r.nodes), tokens=frozenset(self.tokens), rate=rate,
        )  # fmt: skip


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, *,
    delta: bool, decay: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o without its scale [b, h, v], the state behind the step [b, h, k, v]); g by channel."""
    if g is not None:
        state = state * (g if decay else g.exp())[..., None]
    new = v - torch.einsum("bhkv,bhk->bhv", state, k) if delta else v
    new = new if beta is None else beta[..., None] * new
    state = state + torch.einsum("bhk,bhv->bhkv", k, new)
    return torch.einsum("bhkv,bhk->bhv", state, q), state
