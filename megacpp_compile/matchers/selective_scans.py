"""Mamba-1's selective scan (arXiv:2312.00752) over states that an associative scan makes of all tokens at once:

    a = exp(dt A);   b = dt u B;   s_t = a_t s_{t-1} + b_t (`associative_scans`);   y_t = s_t C_t

What makes a, b and y is run small beside these, from operands that are told by the products they are factors of.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import long_dimensions, value
from megacpp_compile.fx.views import SAME_VALUES
from megacpp_compile.fx.walks import descendants, reached
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse_if, refuse_unless
from megacpp_compile.matchers.associative_scans import States, find_states
from megacpp_compile.matchers.ssd.atoms import Dim, number
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.matchers.ssd.resize import Resized, agree
from megacpp_compile.matchers.ssd.resize_rules import RULES
from megacpp_compile.matchers.ssd.roles import RATE, Leaf, arranged
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, operand_of, read_operand, tensors
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, EXPONENTIALS, VIEWS
from megacpp_compile.matchers.ssd.trials import tried

TOLERANCE = 1e-10  # float64
LONGEST = 1 << 15
PRODUCTS = CONTRACTIONS | {aten.mul.Tensor}
READ = "its states are read by more than a product with C and the last of them"
OPERANDS = "its decays, inputs or results are not Mamba-1's: a = exp(dt A), b = dt u B, y = s C"


@dataclasses.dataclass
class SelectiveScan:
    """Operands by role (u, dt, A, B, C), y, and the last state where it is read. Atoms: b, t, d channels, n states."""

    operands: dict[str, Leaf]
    y: Leaf
    finals: list[Leaf]
    b: Dim
    t: Dim
    d: Dim
    n: Dim
    inside: set[Node]


def find_selective_scans(graph: fx.Graph) -> Iterator[SelectiveScan | MatchFailure]:
    """Every associative scan that is one, and why others are none."""
    algebra: Algebra | None = None
    for states in find_states(graph):
        algebra = algebra or Algebra(graph, RULES)
        with torch.no_grad():
            found = tried(_Candidate(algebra, states).found, partial(MatchFailure, states.node, "axes"))
        yield found


class _Candidate:
    def __init__(self, algebra: Algebra, states: States) -> None:
        self.algebra, self.states = algebra, states
        self.inside: set[Node] = set()

    @or_failure
    def found(self) -> SelectiveScan | MatchFailure:
        states = self.states
        refuse_if(
            any(u not in states.inside for n in states.inside - {states.node} for u in n.users),
            states.node, "escapes", READ,
        )
        y, finals = refuse_unless(self._read(), states.node, "escapes", READ)
        decay = self._exponential()
        if decay is None or len(factors := self._factors(decay.args[0], {})) != 2:  # type: ignore[arg-type]
            return MatchFailure(states.node, "operands", OPERANDS)
        inputs = self._factors(states.b, factors)
        shared = [n for n in factors if n in inputs]
        (C,) = rest if len(rest := self._beside(y)) == 1 else (None,)
        refuse_if(len(shared) != 1 or len(inputs) != 3 or C is None, states.node, "operands", OPERANDS)
        (dt,), (A,) = shared, [n for n in factors if n not in shared]
        leaves = list(dict.fromkeys([dt, A, *inputs, C, states.node]))
        self.inside -= {*leaves}
        r = Resized(RULES, sorted(self.inside), leaves, AxisEquations(LONGEST))
        for made in (states.a, states.b):
            for one, other in zip(r.dims[made], r.dims[states.node], strict=True):
                r.axes.same(one, other)
        for u, B in itertools.permutations(n for n in inputs if n is not dt):
            if (scan := self._proved(r, {"u": u, "dt": dt, "A": A, "B": B, "C": C}, y, finals)) is not None:
                return scan
        return MatchFailure(states.node, "operands", OPERANDS)

    # -- operands

    @or_none
    def _read(self) -> tuple[Node, list[Node]] | None:
        """(what a product with the states makes, what the last of them is); None where they are read otherwise."""
        views = list(descendants([self.states.node], lambda u: u.target in SAME_VALUES | VIEWS))
        readers = [(u, n) for n in views for u in n.users if u not in views]
        finals = [u for u, n in readers if _is_last(u, n)]  # of tokens, which `_proved` holds it to
        made = [u for u, _ in readers if u not in finals]
        NoMatch.when(len(made) != 1 or made[0] not in self.algebra.nodes)
        y = made[0]
        if y.target is aten.mul.Tensor:
            NoMatch.when(len(y.users) != 1)
            self.inside.add(y)
            (y,) = y.users
        self.inside |= {*views[1:], y}
        fewer = y.target in CONTRACTIONS | {aten.sum.dim_IntList}
        return (y, finals) if fewer and long_dimensions(y) < long_dimensions(self.states.node) else None

    def _exponential(self) -> Node | None:
        """The exponential that the decays are views of."""
        at, between = self.algebra.path(self.states.a)
        self.inside |= {at} | between
        return at if at.target in EXPONENTIALS and at in self.algebra.nodes else None

    def _factors(self, n: Node, known: dict[Node, None]) -> dict[Node, None]:
        """The operands that `n` is a product of: what is smaller than it, opened where one of `known` is in it."""
        whole, found, pending = long_dimensions(n), dict[Node, None](), [n]
        while pending:
            at, between = self.algebra.path(pending.pop())
            parts = tensors(at) if at.target in PRODUCTS and at in self.algebra.nodes else []
            of_known = any(operand_of(self.algebra, a)[0] in known for a in parts)
            if len(parts) > 1 and (long_dimensions(at) == whole or of_known):
                self.inside |= {at} | between
                pending += reversed(parts)
                continue
            found[read_operand(self.algebra, max(between, default=at), self.inside)] = None
        return found

    def _beside(self, y: Node) -> list[Node]:
        """What the states are multiplied by on the way to `y`."""
        found, made = dict[Node, None](), {self.states.node, *self.algebra.descendants(self.states.node)}
        way = reached([y], lambda n: [a for a in tensors(n) if a in made and a is not self.states.node])
        for a in (a for n in way for a in tensors(n) if a not in made):
            found[read_operand(self.algebra, a, self.inside)] = None
        return list(found)

    # -- the proof

    @or_none
    def _proved(self, r: Resized, roles: dict[str, Node], y: Node, finals: list[Node]) -> SelectiveScan | None:
        states = self.states
        t, *dims = r.of(states.node)
        n_atoms = [a for d in dims for a in d if a not in r.atoms(y)]
        of_rate = set(r.atoms(roles["A"]))
        d_atoms = [a for d in dims for a in d if a in of_rate and a not in n_atoms]
        b_atoms = [a for d in dims for a in d if a not in of_rate and a not in n_atoms]
        b, d, n = b_atoms, d_atoms, n_atoms
        wanted = {"u": [b, t, d], "dt": [b, t, d], "A": [d, n], "B": [b, t, n], "C": [b, t, n]}
        NoMatch.when(
            any(r.of(m.args[0])[m.args[1]] != t for m in finals)  # type: ignore[arg-type, index, call-overload]
        )
        several = [a for part in (b, t, d, n) for a in part]
        NoMatch.when(len(set(several)) != len(several) or not t or not n)
        NoMatch.when(any(set(r.atoms(node)) - {a for dim in wanted[role] for a in dim} for role, node in roles.items()))
        for turn in (0, 1):
            r.solve(turn)
            drawn = r.draw(turn, {roles["dt"]: 1, roles["A"]: -RATE})
            made = dict(zip(("a", "b", "y"), r.run(drawn, [states.a, states.b, y]), strict=True))
            given = {role: arranged(r.axes, drawn[m], r.of(m), wanted[role]) for role, m in roles.items()}
            entering = arranged(r.axes, drawn[states.node], r.of(states.node), [b, t, d, n])
            want = _expected(entering, **given)
            nodes = {"a": (states.a, [b, t, d, n]), "b": (states.b, [b, t, d, n]), "y": (y, [b, t, d])}
            for name, (node, target) in nodes.items():
                NoMatch.when(not agree(arranged(r.axes, made[name], r.of(node), target), want[name], TOLERANCE))
        r.fix()
        last = [Leaf(m, self._of_last(r, m, t)) for m in finals]
        inside = self.inside | states.inside | set(finals)
        return SelectiveScan({role: r.leaf(m) for role, m in roles.items()}, r.leaf(y), last, b, t, d, n, inside)

    def _of_last(self, r: Resized, final: Node, t: Dim) -> tuple[tuple[object, ...], ...]:
        """The dimensions of the last state: those of what it is selected from, but for tokens."""
        return tuple(tuple(dim) for dim in r.of(final.args[0]) if dim != t)  # type: ignore[arg-type]


def _expected(states: Tensor, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> dict[str, Tensor]:
    """Decays, inputs and results of a selective scan with these states."""
    return {"a": (dt[..., None] * A).exp(), "b": (dt * u)[..., None] * B[:, :, None],
            "y": torch.einsum("btdn,btn->btd", states, C)}  # fmt: skip


def _is_last(user: Node, n: Node) -> bool:
    """Whether `user` is the last entry of `n` along a dimension."""
    return user.target is aten.select.int and user.args[2] in (-1, number(value(n).shape[user.args[1]] - 1))  # type: ignore[index]
