"""Loops over tokens whose step is Mamba-2's (arXiv:2405.21060) or Mamba-1's (arXiv:2312.00752):

    S' = exp(dt A) S + dt x B^T;   y = S' C + D x

with a rate A for each head, or for each channel and state; then a channel is a head by itself, and all share B and C.
What tells it from linear attention is that one operand, the step size, is in the decay and in what is written. Products
of operands may be computed within a step, or for all tokens in front of the loop: the last step is run small from whole
tensors, and all that is made of those in front of it has to be made token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import long_dimensions, value
from megacpp_compile.fx.walks import made_from
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.matchers.ssd.boundary import OperandBoundary
from megacpp_compile.matchers.ssd.resize import Resized, agree
from megacpp_compile.matchers.ssd.resize_rules import RULES
from megacpp_compile.matchers.ssd.roles import RATE, arranged
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, operand_of, read_operand, tensors
from megacpp_compile.matchers.ssd.tensor_ops import EXPONENTIALS
from megacpp_compile.matchers.token_loops.fronts import last_token, tokens_of
from megacpp_compile.matchers.token_loops.loops import Loop
from megacpp_compile.reader.links import above, through

TOLERANCE = 1e-10  # float64, one step
LONGEST = 1 << 15  # tokens of the tensors that the last step is run from
MOST_OPERANDS = 4
ROLES = ("x", "B", "C", "D")


class ScanStep:
    """The last step of `loop` as a scan's. `roles`: its operands dt, A, x, B, C and perhaps D, empty where it is none;
    those that the loop reads are whole tensors, `t` has the atom of tokens in each. Atoms: b, h heads, n states, p, and
    `rates` of what A has beside heads: none, or with one for each channel and state n.

    tried: whether its operands could be a scan's, whatever a step makes of them.
    """

    def __init__(self, algebra: Algebra, loop: Loop) -> None:
        self.algebra, self.loop = algebra, loop
        self.inside: set[Node] = set()
        self.roles: dict[str, Node] = {}
        self.tried = False
        given = self._given()
        if given is None:
            return
        leaves = [*given, loop.entering]
        self.r = Resized(RULES, sorted(self.inside - set(leaves)), leaves, AxisEquations(LONGEST))
        for roles in self._assignments(*given):
            self.tried = True
            if self._is(roles):
                self.roles = roles
                break

    # -- operands

    @or_none
    def _given(self) -> list[Node] | None:
        """The step size, the rate, and the other operands."""
        loop, algebra = self.loop, self.algebra
        ends = [loop.states[-1], loop.output]
        NoMatch.when(any(n not in algebra.nodes for n in ends))
        region = algebra.ancestors(ends, stop=[loop.entering])
        decays = [n for n in region if n.target in EXPONENTIALS and n in algebra.nodes and n not in algebra.constants]
        exponents = algebra.ancestors(a for e in decays for a in algebra.inputs(e))
        states = algebra.ancestors(ends, stop=[loop.entering, *decays])
        shared = exponents & states - algebra.constants - {loop.entering}
        NoMatch.when(not decays or not shared)
        dt, between = operand_of(algebra, max(shared))
        boundary = OperandBoundary(algebra, self._made_of({dt, loop.entering}, region), dt)
        boundary.inside |= between
        boundary.found[loop.entering] = None
        self.inside = boundary.inside
        leaves = self._wholes(self._opened(boundary.leaves(loop.output)))
        (dt,) = self._wholes([dt])
        rates = [n for n in leaves if n in exponents and n is not dt]
        operands = [n for n in leaves if n not in (dt, loop.entering, *rates)]
        return [dt, *rates, *operands] if len(rates) == 1 and len(operands) <= MOST_OPERANDS else None

    def _made_of(self, sources: set[Node], region: set[Node]) -> set[Node]:
        """What of `region` is made of `sources`."""
        return made_from(sources, sorted(region & self.algebra.nodes), self.algebra.inputs) - sources

    def _base(self, n: Node) -> Node:
        """What `n` is a view of, or a view of the position that is read."""
        n = self.algebra.source(n)
        return self.algebra.source(self.loop.reads[n].source) if n in self.loop.reads else n

    def _opened(self, leaves: list[Node]) -> list[Node]:
        """`leaves`, a product with what is one of them (the skip, D x) as its factors, and an outer product too."""
        bases, found, pending = {self._base(n) for n in leaves}, list[Node](), leaves[::-1]
        while pending:
            n = pending.pop()
            at, between = self.algebra.path(n)
            factors = tensors(at) if at.target is aten.mul.Tensor and at in self.algebra.nodes else []
            outer = len(factors) == 2 and all(long_dimensions(a) < long_dimensions(at) for a in factors)
            if outer or at is n and any(self._base(a) in bases for a in factors):
                self.inside |= {at} | between
                for a in reversed(factors):
                    pending.append(read_operand(self.algebra, a, self.inside))
            elif n not in found:
                found.append(n)
        return found

    def _wholes(self, leaves: list[Node]) -> list[Node]:
        """`leaves`, each once, those that are read at this position as what they are read of."""
        found: dict[Node, None] = {}
        for n in leaves:
            at = through(n, lambda n: n not in self.loop.reads and self.algebra.passes_on(n))
            if at in self.loop.reads:
                self.inside.update(above(n, at))
                self.inside |= {at, *(a for a in at.all_input_nodes if a is not self.loop.reads[at].source)}
                n = self.loop.reads[at].source
            found[n] = None
        return list(found)

    # -- dimensions

    def _assignments(self, dt: Node, rate: Node, *operands: Node) -> Iterator[dict[str, Node]]:
        state, out = self.r.atoms(self.loop.entering), self.r.atoms(self.loop.output)
        t = tokens_of(self.r, self.loop)
        same = set(self.r.atoms(self.loop.states[-1])) == set(state)
        if t is None or not same or len(set(state)) != len(state) or not set(out) < set(state):
            return
        self.t, n = t, set(state) - set(out)
        of_rate = set(self.r.atoms(rate))
        each = bool(of_rate & n)  # a rate for each state
        outer = set(out) - {*self.r.atoms(dt), *of_rate}  # channels, and sequences that share their steps
        if of_rate - set(out) != (n if each else set()) or set(self.r.atoms(dt)) - {*out, *t}:
            return
        for names in itertools.permutations(ROLES, len(operands)):
            roles = dict(zip(names, operands, strict=True))
            if not {"x", "B"} <= roles.keys():
                continue
            roles.setdefault("C", roles["B"])
            x, B, C = (set(self.r.atoms(roles[name])) - t for name in ("x", "B", "C"))
            p = [] if each else [a for a in out if a in outer and a not in B | C]
            if not (p or each) or not set(p) <= x <= set(out) or not n <= B & C or (B | C) - set(state):
                continue
            if "D" in roles and not set(self.r.atoms(roles["D"])) <= set(out) - set(p):
                continue
            heads = [a for a in out if a not in p]
            several = each or value(self.loop.entering).dim() > 3
            first = self.r.of(self.loop.entering)[0] if several else []
            self.b = [a for a in heads if a in first and a not in of_rate]
            self.h = [a for a in heads if a not in self.b]
            self.n, self.p, self.rates = [a for a in state if a in n], p, [a for a in state if a in n & of_rate]
            of_heads = of_rate - n | set(self.r.atoms(roles["D"]) if "D" in roles else ())
            if of_heads <= set(self.h) and not (each and (B | C) & set(self.h)):
                yield {"dt": dt, "A": rate, **roles}

    # -- the proof

    def _is(self, roles: Mapping[str, Node]) -> bool:
        """Whether the step is a scan's with these operands."""
        r, loop = self.r, self.loop
        for turn in (0, 1):
            r.solve(turn)
            drawn = r.draw(turn, {roles["dt"]: 1, roles["A"]: -RATE})
            y, behind = r.run(drawn, [loop.output, loop.states[-1]])
            targets = {
                "x": [self.b, self.h, self.p], "dt": [self.b, self.h], "A": [self.h, self.rates], "D": [self.h],
                "B": [self.b, self.h, self.n], "C": [self.b, self.h, self.n],
            }  # fmt: skip
            given = {name: last_token(r, drawn[n], n, targets[name], self.t) for name, n in roles.items()}
            state = [self.b, self.h, self.p, self.n]
            before = arranged(r.axes, drawn[loop.entering], r.of(loop.entering), state)
            want, after = step(before, **given)
            got = arranged(r.axes, behind, r.of(loop.states[-1]), state)
            read = arranged(r.axes, y, r.of(loop.output), targets["x"])
            if not agree(got, after, TOLERANCE) or not agree(read, want, TOLERANCE):
                return False
        return True


def step(
    state: Tensor, dt: Tensor, A: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y [b, h, p], the state behind the step [b, h, p, n]); A [h, 1 or n]."""
    state = (dt[..., None] * A).exp()[:, :, None] * state + torch.einsum("bh,bhp,bhn->bhpn", dt, x, B)
    y = torch.einsum("bhpn,bhn->bhp", state, C)
    return y if D is None else y + D[:, None] * x, state
