"""Linear attention with gates, in chunks or as one triangle: a scan without a step.

    S_t = diag(exp g_t) S_t-1 + k_t v_t^T;   o_t = scale * S_t^T q_t

g is one number for each head and token (simple GLA), or one for each channel of the keys (arXiv:2312.06635). What tells
it from Mamba-2's scan is that the operand whose sums are the exponents is read by nothing else; it is found and proved
as that is (`scan.py`, `roles.py`), beside this recurrence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.matchers.ssd.atoms import Dim
from megacpp_compile.matchers.ssd.boundary import MOST_OPERANDS, OperandBoundary
from megacpp_compile.matchers.ssd.resize import Resized, agree
from megacpp_compile.matchers.ssd.resize_rules import RULES
from megacpp_compile.matchers.ssd.roles import RATE, TOLERANCE, Leaf, Roles, arranged
from megacpp_compile.matchers.ssd.scan import candidates, exports_of, found_at_decays, is_decay
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, operand_of
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS
from megacpp_compile.matchers.ssd.trials import tried


@dataclasses.dataclass
class LinearAttention:
    """A proved one. Atoms: b batch, t tokens, h heads, k channels of keys, v of values."""

    o: Leaf
    final_states: list[Leaf]
    q: Leaf
    k: Leaf
    v: Leaf
    g: Leaf
    initial_state: Leaf | None
    scale: float
    dims: dict[str, tuple[object, ...]]
    chunk: int
    inside: set[Node]


def find_linear_attention(graph: fx.Graph) -> Iterator[LinearAttention]:
    """Every linear attention of `graph` whose gates are summed over positions."""
    yield from filter(None, found_at_decays(graph, _attention_of))


def _attention_of(algebra: Algebra, decay: Node) -> LinearAttention | None:
    """The linear attention that `decay` is part of."""
    with torch.no_grad():
        found = (tried(partial(_at, algebra, root), lambda why: None) for root in candidates(algebra, decay))
        return next(filter(None, found), None)


@or_none
def _at(algebra: Algebra, root: Node) -> LinearAttention | None:
    everything = algebra.ancestors([root])
    decays = [n for n in everything if is_decay(algebra, n)]
    exponents = algebra.ancestors(a for e in decays for a in algebra.inputs(e))
    sums = [m for m in exponents if _sums(algebra, m)]
    gates = {operand_of(algebra, algebra.inputs(m)[0])[0] for m in sums}
    first = {g for g in gates if not any(_sums(algebra, m) for m in algebra.ancestors([g]))}
    NoMatch.when(len(first) != 1)
    (g,) = first
    between = {n for m in sums for n in operand_of(algebra, algebra.inputs(m)[0])[1]}
    carrying = algebra.ancestors([root], stop=[g]) & set(algebra.descendants(g)) - {g}
    NoMatch.when(not all(n in carrying for n in decays))
    boundary = OperandBoundary(algebra, carrying, g)
    boundary.inside |= between
    operands = [n for n in boundary.leaves(root) if n is not g]
    NoMatch.when(len(operands) > MOST_OPERANDS - 2)
    exports, shown = exports_of(algebra, carrying, boundary.inside, [g, *operands], g, root)
    resized = Resized(RULES, sorted(boundary.inside | shown), [g, *operands])
    return _LinearRoles(algebra, resized, root, g, g, operands, exports).attention()


def _sums(algebra: Algebra, n: Node) -> bool:
    """Whether `n` sums its operand over consecutive positions."""
    if n not in algebra.nodes or n in algebra.constants or len(algebra.inputs(n)) != 1:
        return False
    return n.target is aten.cumsum.default or n.target in CONTRACTIONS


class _LinearRoles(Roles):
    """x is v, B is k, C is q, and the step is g."""

    def attention(self) -> LinearAttention | None:
        r, g, made = self.r, self.r.atoms(self.dt), self.r.atoms(self.root)
        if len(set(made)) != len(made) or len(set(g)) != len(g):
            return None
        p = [a for a in made if a not in g]
        shared = [a for a in g if a in made]
        dims = [d for m in (self.root, *self.operands, self.dt) for d in r.of(m) if d and set(d) <= set(shared)]

        def attentions() -> Iterator[LinearAttention | None]:
            for t in {tuple(d): d for d in dims}.values():
                others = [a for a in made if a in shared and a not in t]
                for b in (others[:1], []):
                    h = [a for a in others if a not in b]
                    for roles in (given for given in self._assignments(b, t, h, p) if "D" not in given):
                        yield tried(partial(self._proved, roles, b, t, h, p), lambda why: None)

        return next(filter(None, attentions()), None)

    @or_none
    def _proved(self, roles: dict[str, Node], b: Dim, t: Dim, h: Dim, p: Dim) -> LinearAttention | None:
        r, scales = self.r, []
        n = [a for a in self.r.atoms(roles["B"]) if a not in {*b, *t, *h, *p}]
        NoMatch.when(set(self.r.atoms(self.dt)) - {*b, *t, *h, *n})
        for turn in (0, 1):
            r.solve(turn)
            operands = r.draw(turn, {self.dt: -RATE})
            o, *states = r.run(operands, [self.root, *self.exports])
            targets = {"x": [b, t, h, p], "B": [b, t, h, n], "C": [b, t, h, n], "initial_state": [b, h, n, p]}
            given = {k: arranged(r.axes, operands[m], r.of(m), targets[k]) for k, m in roles.items()}
            gates = arranged(r.axes, operands[self.dt], r.of(self.dt), [b, t, h, n])
            want, state = recurrence(given["C"], given["B"], given["x"], gates, given.get("initial_state"))
            got = arranged(r.axes, o, r.of(self.root), [b, t, h, p])
            scale = float((got * want).sum() / (want * want).sum())
            NoMatch.when(scale == 0 or not agree(got, scale * want, TOLERANCE))
            scales.append(scale)
            for final, found in zip(self.exports, states, strict=True):
                same = {a for d in r.of(final) for a in d} == {*b, *h, *n, *p}
                NoMatch.when(
                    not same or not agree(arranged(r.axes, found, r.of(final), [b, h, n, p]), state, TOLERANCE)
                )
        NoMatch.when(abs(scales[0] - scales[1]) > TOLERANCE * abs(scales[0]))
        r.fix()
        made = {k: r.leaf(m) for k, m in {**roles, "g": self.dt}.items()}
        o_leaf, *finals = map(r.leaf, (self.root, *self.exports))
        return LinearAttention(
            o_leaf, finals, made["C"], made["B"], made["x"], made["g"], made.get("initial_state"), scales[0],
            {"b": tuple(b), "t": tuple(t), "h": tuple(h), "k": tuple(n), "v": tuple(p)}, self._chunk(t), set(r.nodes),
        )  # fmt: skip


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """o without its scale [b, t, h, v] and the last state [b, h, k, v]; all operands by head, g by channel."""
    b, t, h, _ = v.shape
    state = v.new_zeros(b, h, k.shape[-1], v.shape[-1]) if state is None else state
    out = []
    for i in range(t):
        state = g[:, i].exp()[..., None] * state + torch.einsum("bhk,bhv->bhkv", k[:, i], v[:, i])
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
    return torch.stack(out, 1), state
