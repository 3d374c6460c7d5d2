"""What one step of a loop computes, told by running it small, beside the recurrences that have an op:

    S' = diag(exp g) S + k u^T;   o = scale * S'^T q;   u = beta (v - (diag(exp g) S)^T k), or v alone

Linear attention is the second, with a gate for each head, each channel of the keys, or a rate that no token changes
(arXiv:2006.16236, 2312.06635, 2307.08621); the first corrects what the state itself predicts (arXiv:2412.06464,
2510.26692). As all of a step is sums, products and exponentials of its operands, two that agree on random operands are
the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import is_cast
from megacpp_compile.matchers.ssd.axes import Dim, NoAxes
from megacpp_compile.matchers.ssd.resize import Resized
from megacpp_compile.matchers.ssd.resize_rules import RULES
from megacpp_compile.matchers.ssd.roles import Leaf, arranged
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, constants_of, tensors
from megacpp_compile.matchers.ssd.tensor_ops import EXPONENTIALS
from megacpp_compile.matchers.token_loops.steps import Loop, NoLoop, find_loops

aten = torch.ops.aten
TOLERANCE = 1e-10  # float64, one step
MOST_OPERANDS = 6
ROLES = ("q", "k", "v", "g", "beta")
Dims = tuple[tuple[object, ...], ...]


@dataclasses.dataclass
class TokenLoop:
    """A proved loop. operands: q, k, v, and perhaps g and beta, as nodes of the last step.

    delta: whether the state is corrected by what it predicts; decay: g is the decay itself, not its logarithm.
    Atoms: b batch, h heads, k channels of keys, v of values.
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


def find_token_loops(graph: fx.Graph) -> Iterator[TokenLoop | NoLoop]:
    """Every loop of `graph` that is a delta rule or a linear attention, and what looks like one and is none."""
    algebra: Algebra | None = None
    for loop in find_loops(graph):
        if isinstance(loop, NoLoop):
            if value(loop.node).dim() > 2:
                yield loop
            continue
        algebra = algebra or Algebra(graph, RULES)
        try:
            with torch.no_grad():
                found = _proved(algebra, loop)
        except NoAxes as e:
            found = NoLoop(loop.output, "axes", str(e))
        if found is not None:
            yield found


def _proved(algebra: Algebra, loop: Loop) -> TokenLoop | NoLoop | None:
    step = _Step(algebra, loop)
    if value(loop.entering).dim() < 2 or len(step.leaves) > MOST_OPERANDS:
        return None
    if step.strange is not None:
        refused = NoLoop(step.strange, "op", "what becomes of the state is more than sums and products")
        return refused if step.outer else None
    resized = Resized(RULES, sorted(step.inside), [loop.entering, *step.leaves, *step.again])
    for n, leaf in step.again.items():
        for one, other in zip(resized.dims[n], resized.dims[leaf], strict=True):
            resized.axes.same(one, other)
    return _Roles(loop, step, resized).found()


class _Step:
    """The last step as a subgraph: `leaves` are its operands, what enters from the step before excluded."""

    def __init__(self, algebra: Algebra, loop: Loop) -> None:
        self.algebra, self.loop = algebra, loop
        self.inside: set[Node] = set()
        self.leaves: list[Node] = []
        self.again: dict[Node, Node] = {}  # reads of what one of the leaves reads
        self.strange: Node | None = None
        self.own = _of_state(loop)
        for n in sorted(self.own):
            if n not in algebra.nodes:
                self.strange = self.strange or n
            self.inside.add(n)
            for a in tensors(n):
                if a not in self.own and a is not loop.entering:
                    self._descend(a)
        self.outer = sum(value(n).dim() >= 2 for n in self.leaves) >= 3

    def _descend(self, n: Node) -> None:
        """Follow `n`, which the state does not reach, to operands."""
        if n in self.inside or n in self.leaves or n in self.again:
            return
        if n in self.algebra.constants:
            self.inside |= constants_of(self.algebra, n)
        elif self._is_operand(n):
            read = self.loop.reads.get(n)
            same = next((m for m in self.leaves if read and self.loop.reads.get(m) == read), None)
            if same is None:
                self.leaves.append(n)
            else:
                self.again[n] = same
        else:
            self.inside.add(n)
            for a in tensors(n):
                self._descend(a)

    def _is_operand(self, n: Node) -> bool:
        """Whether `n` is taken as it is: what is read of a tensor, what is no algebra, and what is as large as the one
        tensor that it is made of (a norm within the step, for one)."""
        if n in self.loop.reads or n not in self.algebra.nodes:
            return True
        if is_cast(n) or n.target in EXPONENTIALS or len(tensors(n)) == 1 and n.target is not aten.sum.dim_IntList:
            return False
        sources = {self.loop.reads[r].source for r in self.algebra.behind([n]) if r in self.loop.reads}
        if len(sources) > 1:
            return False
        return value(n).numel() == max((value(a).numel() for a in tensors(n)), default=0)


def _of_state(loop: Loop) -> set[Node]:
    """The nodes of the last step that are made of the state that enters it, up to the next and the output."""
    wanted, pending = set[Node](), [loop.states[-1], loop.output]
    while pending:
        n = pending.pop()
        if n not in wanted and n is not loop.entering and n in loop.inside:
            wanted.add(n)
            pending += n.all_input_nodes
    own: set[Node] = set()
    for n in sorted(wanted):
        if any(a is loop.entering or a in own for a in n.all_input_nodes):
            own.add(n)
    return own


class _Roles:
    """Which leaf is which operand: by atoms where they tell, by trial where they do not."""

    def __init__(self, loop: Loop, step: _Step, resized: Resized) -> None:
        self.loop, self.step, self.r = loop, step, resized
        self.next = loop.states[-1]

    def atoms(self, n: Node) -> Dim:
        return [a for d in self.r.of(n) for a in d]

    def found(self) -> TokenLoop | NoLoop | None:
        loop = self.loop
        state = self.atoms(loop.entering)
        sets = [set(self.atoms(n)) for n in (*self.step.leaves, self.next, loop.output)]
        if len(set(state)) != len(state) or any(s - set(state) for s in sets) or sets[-2] != set(state):
            return None
        tried = False
        for roles in self._assignments():
            tried = True
            for delta, decay in itertools.product((True, False), (False, True) if "g" in roles else (False,)):
                if "beta" in roles and not delta:
                    continue
                scale = self._scale(roles, delta, decay)
                if scale is not None:
                    return self._made(roles, delta, decay, scale)
        if not tried:
            wanted = "a query, a key and a value of each token, with a gate of heads or of the key's channels"
            return NoLoop(loop.output, "roles", f"its operands are not {wanted}") if self.step.outer else None
        return NoLoop(loop.output, "differs", "a step is neither the delta rule nor linear attention")

    def _assignments(self) -> Iterator[dict[str, Node]]:
        leaves = self.step.leaves
        state, out = set(self.atoms(self.loop.entering)), set(self.atoms(self.loop.output))
        for names in itertools.permutations(ROLES, len(leaves)):
            roles = dict(zip(names, leaves, strict=True))
            if not {"k", "v"} <= roles.keys():
                continue
            roles.setdefault("q", roles["k"])
            q, k, v = (set(self.atoms(roles[name])) for name in ("q", "k", "v"))
            keys, values = state - out, state & out & v - k
            if not keys or not values or not keys <= k & q or keys & v or q & values:
                continue
            if "g" in roles and set(self.atoms(roles["g"])) & values:
                continue
            if "beta" in roles and set(self.atoms(roles["beta"])) & (values | keys):
                continue
            yield roles

    def _dims(self, roles: dict[str, Node]) -> tuple[Dim, Dim, Dim, Dim]:
        state, out = self.atoms(self.loop.entering), set(self.atoms(self.loop.output))
        keys = [a for a in state if a not in out]
        values = [a for a in state if a in out and a not in set(self.atoms(roles["k"]))]
        rest = [a for a in state if a not in keys and a not in values]
        first = self.r.of(self.loop.entering)[0] if value(self.loop.entering).dim() > 3 else []
        b = first if set(first) <= set(rest) else []
        return b, [a for a in rest if a not in b], keys, values

    def _scale(self, roles: dict[str, Node], delta: bool, decay: bool) -> float | None:
        """What o is multiplied by, where the step is the recurrence otherwise."""
        r, scales = self.r, []
        b, h, k, v = self._dims(roles)
        for turn in (0, 1):
            r.solve(turn)
            generator = torch.Generator().manual_seed(turn)  # its own: what a model draws does not depend on compiling
            leaves = {n: torch.randn(r.shape(r.of(n)), dtype=torch.float64, generator=generator) for n in r.leaves}
            leaves |= {n: leaves[leaf] for n, leaf in self.step.again.items()}
            out, behind = r.run(leaves, [self.loop.output, self.next])
            targets = {"q": [b, h, k], "k": [b, h, k], "v": [b, h, v], "g": [b, h, k], "beta": [b, h]}
            given = {name: arranged(r.axes, leaves[n], r.of(n), targets[name]) for name, n in roles.items()}
            before = arranged(r.axes, leaves[self.loop.entering], r.of(self.loop.entering), [b, h, k, v])
            want, state = step(before, **given, delta=delta, decay=decay)
            got = arranged(r.axes, behind, r.of(self.next), [b, h, k, v])
            o = arranged(r.axes, out, r.of(self.loop.output), [b, h, v])
            if not _equal(got, state):
                return None
            scale = float((o * want).sum() / (want * want).sum())
            if scale == 0 or not _equal(o, scale * want):
                return None
            scales.append(scale)
        return scales[0] if abs(scales[0] - scales[1]) <= TOLERANCE * abs(scales[0]) else None

    def _made(self, roles: dict[str, Node], delta: bool, decay: bool, scale: float) -> TokenLoop:
        b, h, k, v = self._dims(roles)
        return TokenLoop(
            self.loop, {name: self._leaf(n) for name, n in roles.items()}, delta, decay, scale,
            self._leaf(self.loop.output), self._leaf(self.loop.entering), b, h, k, v, set(self.r.nodes),
        )  # fmt: skip

    def _leaf(self, n: Node) -> Leaf:
        return Leaf(n, tuple(tuple(d) for d in self.r.of(n)))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


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
