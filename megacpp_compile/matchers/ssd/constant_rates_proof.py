"""The proof that a subgraph is a linear attention whose decay no token changes: at small sizes, on random operands, it
computes what `megacpp::gated_linear_attention` does with gates that are all one rate."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings.gated_linear_attention.reference import gated_linear_attention
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes
from megacpp_compile.matchers.ssd.resize import Resized, agree, tensor_dims
from megacpp_compile.matchers.ssd.roles import Leaf, arranged

POSITIONS = {aten.arange.default, aten.arange.start}
MOST_ELEMENTS = 1 << 23  # of its largest tensor: 64 MiB
TOLERANCE = 1e-8  # float64, a few hundred operations
FIRST, SOME = 16, 4  # tokens, and sequences and heads of them, that are looked at first
ROLES = ("v", "k", "q", "initial_state")


@dataclasses.dataclass
class Retention:
    """A proved one. Atoms: b batch, t tokens, h heads, k channels of keys, v of values.

    rate: what the logarithm of the decay is `factor` times, or the decay itself where `power`; None where `factor` is
    that logarithm.
    """

    o: Leaf
    final_states: list[Leaf]
    q: Leaf
    k: Leaf
    v: Leaf
    rate: Leaf | None
    factor: float
    power: bool
    initial_state: Leaf | None
    scale: float
    dims: Mapping[str, tuple[object, ...]]
    chunk: int
    inside: set[Node]


@dataclasses.dataclass(frozen=True)
class Run:
    """`values` of the result and of what else is read, for operands `drawn`, where the logarithm of the decay is taken
    to be `factor` times the rate, or that of the rate, or without a rate `factor` itself."""

    drawn: dict[Node, Tensor]
    values: list[Tensor]
    factor: float


@dataclasses.dataclass(frozen=True)
class Reading:
    """Which operand has which role, and of which atoms dimensions consist: as in `Retention`."""

    roles: dict[str, Node]
    b: Dim
    t: Dim
    h: Dim
    n: Dim
    p: Dim


class Trial:
    """The subgraph run at small sizes, beside the recurrence, with each reading of its operands."""

    def __init__(
        self, r: Resized, root: Node, tables: list[Node], rate: Node | None, operands: list[Node],
        exports: list[Node],
    ) -> None:  # fmt: skip
        self.r, self.root, self.tables, self.rate = r, root, tables, rate
        self.operands, self.exports = operands, exports
        self.power = rate is not None and any(n.target is aten.pow.Tensor_Tensor for n in tables)
        self._runs = dict[tuple[int, int], Run]()
        self._turn = -1

    def found(self) -> Retention | None:
        made = self.r.atoms(self.root)
        if len(set(made)) != len(made):
            return None
        readings = list(self._readings(made))
        signs = (1,) if self.rate is None or self.power else (1, -1)
        return next(filter(None, (self._proved(reading, sign) for sign in signs for reading in readings)), None)

    def _readings(self, made: Dim) -> Iterator[Reading]:
        """How the result, over the atoms `made`, may be made of the operands."""
        heads = [] if self.rate is None else self.r.atoms(self.rate)
        if len(set(heads)) != len(heads):
            return  # of distances, not of heads
        for roles in self._assignments():
            q, k, v = (set(self.r.atoms(roles[name])) for name in ("q", "k", "v"))
            n = [a for a in self.r.atoms(roles["k"]) if a in q - v and a not in made]
            p = [a for a in made if a in v and a not in q | k | set(heads)]
            shared = [a for a in made if a not in p]
            if any(len(set(a)) != len(a) for a in map(self.r.atoms, roles.values())):
                continue
            if not p or not n or v - set(made) or (q | k) - {*n, *shared} or not set(heads) <= set(shared):
                continue
            every = [d for m in (self.root, *self.operands) for d in self.r.of(m) if d]
            times = [d for d in every if set(d) <= {*shared} - {*heads}]
            for t in {tuple(d): d for d in times}.values():
                given = set(self.r.atoms(roles["initial_state"])) if "initial_state" in roles else set()
                if not set(t) <= q & k & v or given - {*n, *p, *shared} or given & set(t):
                    continue
                others = [a for a in shared if a not in t]
                for b in ([a for a in others if a not in heads][:1], []):
                    h = [a for a in others if a not in b]
                    if set(heads) <= set(h):
                        yield Reading(roles, b, t, h, n, p)

    def _assignments(self) -> Iterator[dict[str, Node]]:
        for names in itertools.permutations(ROLES, len(self.operands)):
            roles = dict(zip(names, self.operands, strict=True))
            if {"k", "v"} <= roles.keys():
                yield {"q": roles["k"], **roles}

    def _solve(self, turn: int) -> None:
        if turn != self._turn:
            self.r.solve(turn)
            self._turn = turn

    def _run(self, turn: int, sign: int) -> Run:
        """With sizes and operands of `turn`: as if the decay rose with the rate, or for a `sign` of -1 fell with it."""
        if (turn, sign) in self._runs:
            return self._runs[turn, sign]
        r = self.r
        self._solve(turn)
        largest = max((math.prod(r.shape(d)) for n in r.nodes if (d := tensor_dims(r.dims[n]))), default=0)
        NoAxes.when(largest > MOST_ELEMENTS, "its positions are too many to be tried")
        steep = min(1, 16 / max(r.shape(r.dims[self.root])))  # so that the first token is seen by the last
        drawn = r.draw(turn, {} if self.rate is None else {self.rate: 1})
        if self.rate is not None:
            slopes = steep * (0.05 + 0.2 * drawn[self.rate])
            drawn[self.rate] = (-slopes).exp() if self.power else -sign * slopes
        count = 1 + len(self.exports)
        values = r.run(drawn, [self.root, *self.exports, *self.tables])
        factor = self._factor(drawn, values[count:])
        run = Run(drawn, values[:count], sign * factor if self.rate is not None else -factor)
        self._runs[turn, sign] = run
        return run

    def _factor(self, drawn: dict[Node, Tensor], tables: list[Tensor]) -> float:
        """The least step of the tables' logarithms, in multiples of the rate, without its sign."""
        r, steps = self.r, list[Tensor]()
        for n, table in zip(self.tables, tables, strict=True):
            logs = table.log()
            if self.rate is not None:
                own, dims = self.r.atoms(self.rate), r.of(n)
                if [a for d in dims for a in d if a in own] != own:
                    continue  # without its heads, or in another order
                rate = (drawn[self.rate].log() if self.power else drawn[self.rate]).reshape(-1)
                logs = logs / rate.view([r.axes.size([a for a in d if a in own]) for d in dims])
            steps.append(logs[logs.isfinite()].flatten())
        every = torch.cat(steps) if steps else torch.zeros(0)
        every = every[every.abs() > 1e-9]
        NoAxes.when(not every.numel(), "its tables do not decay")
        return float(every.abs().min())

    @or_none
    def _scale(self, turn: int, sign: int, reading: Reading) -> float | None:
        """What the recurrence's result is to be multiplied by to be that of a run, with its states as they are; None
        where it is another."""
        run, r, (b, t, h, n, p) = self._run(turn, sign), self.r, (getattr(reading, name) for name in "bthnp")
        self._solve(turn)
        axes, roles = r.axes, reading.roles
        targets = {"q": [b, t, h, n], "k": [b, t, h, n], "v": [b, t, h, p], "initial_state": [b, h, n, p]}
        given = {name: arranged(axes, run.drawn[m], r.of(m), targets[name]) for name, m in roles.items()}
        got = arranged(axes, run.values[0], r.of(self.root), targets["v"])
        logs = torch.ones([axes.size(h)], dtype=torch.float64)
        if self.rate is not None:
            rate = arranged(axes, run.drawn[self.rate], r.of(self.rate), [h])
            logs = rate.log() if self.power else rate
        gates = (run.factor * logs).expand(given["v"].shape[:3])
        # Most readings fail on a few sequences' first tokens, which see no others.
        some = slice(SOME), slice(FIRST), slice(SOME)
        few = {name: x[:SOME, :SOME] if name == "initial_state" else x[some] for name, x in given.items()}
        NoMatch.when(_multiple(got[some], _recurrence(few, gates[some], FIRST)[0], 100 * TOLERANCE) is None)
        want, state = _recurrence(given, gates, 64)
        scale = _multiple(got, want, TOLERANCE)
        for final, found in zip(self.exports, run.values[1:], strict=True):
            same = {a for d in r.of(final) for a in d} == {*b, *h, *n, *p}
            NoMatch.when(
                not same or not agree(arranged(axes, found, r.of(final), targets["initial_state"]), state, TOLERANCE)
            )
        return scale

    @or_none
    def _proved(self, reading: Reading, sign: int) -> Retention | None:
        scales, r, roles = list[float](), self.r, reading.roles
        for turn in (0, 1):
            scale = NoMatch.unless(self._scale(turn, sign, reading))
            scales.append(scale)
        runs, (b, t, h, n, p) = [self._run(turn, sign) for turn in (0, 1)], (getattr(reading, a) for a in "bthnp")
        factors = [run.factor for run in runs]
        NoMatch.when(any(abs(a - c) > TOLERANCE * abs(a) for a, c in (scales, factors)))
        r.fix()
        leaf = {name: r.leaf(m) for name, m in roles.items()}
        o, *finals = map(r.leaf, (self.root, *self.exports))
        rate_leaf = None if self.rate is None else r.leaf(self.rate)
        dims = {"b": tuple(b), "t": tuple(t), "h": tuple(h), "k": tuple(n), "v": tuple(p)}
        chunk = max((value(m).shape[0] for m in r.nodes if m.target in POSITIONS), default=64)
        return Retention(
            o, finals, leaf["q"], leaf["k"], leaf["v"], rate_leaf, _rounded(factors[0]), self.power,
            leaf.get("initial_state"), _rounded(scales[0]), dims, chunk if isinstance(chunk, int) else 64, set(r.nodes),
        )  # fmt: skip


def _rounded(number: float) -> float:
    """Without what rounding in the trial made of it."""
    number = float(f"{number:.13g}")
    return float(round(number)) if abs(number - round(number)) < 1e-12 else number


def _recurrence(given: Mapping[str, Tensor], gates: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The results and the last state."""
    operands = given["q"], given["k"], given["v"], gates, given.get("initial_state")
    o, state, _ = gated_linear_attention(*operands, None, 1.0, chunk, torch.float64)
    return o, state


def _multiple(a: Tensor, of: Tensor, tolerance: float) -> float | None:
    """The number that `of` times it is `a`."""
    scale = float((a * of).sum() / of.square().sum())
    return scale if math.isfinite(scale) and scale != 0 and agree(a, scale * of, tolerance) else None
