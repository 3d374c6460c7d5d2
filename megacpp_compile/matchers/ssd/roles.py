"""Which operand of a scan is which, and the proof that it is one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.ssd.atoms import Dim, NoAxes, flat
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.matchers.ssd.packed import Reading, readings
from megacpp_compile.matchers.ssd.resize import Leaf, Resized, agree
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra
from megacpp_compile.matchers.ssd.trials import best_of, tried

TOLERANCE = 1e-8  # float64, a few hundred operations
RATE = 0.4  # the largest of a trial
BEGINS = 0.3  # how likely a token of a trial begins a document
LOUD = 1e30  # by so much is what comes before a document multiplied: what is left of it after exp(-80) shows


@dataclasses.dataclass
class Scan:
    """A proved scan. Atoms: b batch, t tokens, h heads (groups of B and C first), p channels, n states.

    documents: what tells packed documents apart, where the state starts anew with them, read as `reading`.
    """

    y: Leaf
    final_states: list[Leaf]
    x: Leaf
    dt: Leaf
    A: Leaf
    B: Leaf
    C: Leaf
    D: Leaf | None
    initial_state: Leaf | None
    b: Dim
    t: Dim
    h: Dim
    p: Dim
    n: Dim
    chunk: int
    inside: set[Node]
    documents: Leaf | None = None
    reading: Reading | None = None


@dataclasses.dataclass(frozen=True)
class NoScan(MatchFailure):
    """Why something with a scan's decays is none. `stage`: how far it got, the furthest being the best reason.
    `decays`: those that it answers for."""

    stage: int = 0
    decays: frozenset[Node] = frozenset()


@dataclasses.dataclass(frozen=True)
class Documents:
    """What a trial drew: where documents begin [b, t], and the tensor that says so."""

    begins: Tensor
    leaf: Tensor

    def before(self) -> Tensor:
        """[b, t]: what comes before a row's last document."""
        count = self.begins.cumsum(1)
        return count < count[:, -1:]


class Roles:
    """Which leaf is which operand: by atoms where they tell, by trial where they do not."""

    def __init__(
        self, algebra: Algebra, resized: Resized, root: Node, dt: Node, rate: Node, operands: list[Node],
        exports: list[Node], documents: Sequence[Node] = (),
    ) -> None:  # fmt: skip
        self.algebra, self.r, self.root, self.dt, self.rate = algebra, resized, root, dt, rate
        self.operands, self.exports, self.documents = operands, exports, documents

    def scan(self) -> Scan | NoScan:
        r, dt, made = self.r, self.dt, self.r.atoms(self.root)
        if len(set(made)) != len(made):
            return NoScan(self.root, "roles", "a dimension of the result occurs twice", 2)
        steps, heads = self.r.atoms(dt), self.r.atoms(self.rate)
        for leaf, atoms in ((dt, steps), (self.rate, heads)):
            if len(set(atoms)) != len(atoms):
                return NoScan(leaf, "roles", "a dimension of the decay occurs twice, as those of a mask's rows do", 3)
        if not set(heads) <= set(steps):
            return NoScan(self.rate, "rate", "the rate of the decay is not one number for each head", 3)
        lost = [a.size for a in steps if a not in made]
        if lost:
            return NoScan(self.dt, "axes", f"the step's dimension of {lost[0]} is not known to be one of the result", 3)
        p = [a for a in made if a not in steps]
        # The step may be split into chunks already: time is then one dimension of an operand or of the result alone.
        whole = [d for m in (self.root, *self.operands) for d in r.of(m) if len(d) > 1 and set(d) <= set(steps)]
        outer = [d for d in (*whole, *r.of(dt)) if not set(d) & set(heads)]
        outer = [d for i, d in enumerate(outer) if d not in outer[i + 1 :]]
        def scans() -> Iterator[Scan | NoScan]:
            for t in [*reversed(outer), []]:
                b = [a for a in steps if a not in heads and a not in t]
                for roles, reading in itertools.product(
                    self._assignments(b, t, heads, p), readings(self.documents) if self.documents else [None]
                ):
                    attempt = functools.partial(self._try, roles, b, t, heads, p, reading)
                    yield tried(attempt, lambda why: NoScan(self.root, "axes", why, 5))

        return best_of(scans(), NoScan(self.root, "roles", "its operands are not those of a scan", 3))

    def _assignments(self, b: Dim, t: Dim, h: Dim, p: Dim) -> Iterator[dict[str, Node]]:
        """Operands as x, B, C and perhaps D and an initial state, where dimensions allow it."""
        known = {*b, *t, *h, *p}
        timed = [n for n in self.operands if set(self.r.atoms(n)) & set(t) or not t]
        others = [n for n in self.operands if n not in timed]
        if not t:
            others = []
        for names in itertools.product(("x", "B", "C", "D", "initial_state"), repeat=len(self.operands)):
            roles = dict(zip(names, self.operands, strict=True))
            if len(roles) < len(self.operands) or not {"x", "B"} <= roles.keys():
                continue
            if t and any((n in others) == (name in ("x", "B", "C")) for name, n in roles.items()):
                continue
            roles.setdefault("C", roles["B"])  # one tensor as both
            if any(len(self.r.atoms(n)) != len(set(self.r.atoms(n))) for n in roles.values()):
                continue
            x, B, C = (set(self.r.atoms(roles[k])) for k in ("x", "B", "C"))
            n = B - known
            if not set(p) <= x <= known or C - known != n or (B | C) & set(p):
                continue
            if "D" in roles and not set(self.r.atoms(roles["D"])) <= set(h):
                continue
            if "initial_state" in roles and not set(self.r.atoms(roles["initial_state"])) <= {*b, *h, *p, *n}:
                continue
            yield roles

    def _try(self, roles: dict[str, Node], b: Dim, t: Dim, h: Dim, p: Dim, reading: Reading | None) -> Scan | NoScan:
        r = self.r
        n = [a for a in self.r.atoms(roles["B"]) if a not in {*b, *t, *h, *p}]
        nodes = {"dt": self.dt, "A": self.rate, **roles}
        for turn in range(2 if reading is None else 4):  # where documents begin is one draw of many
            r.solve(turn)
            # A generator of its own: what the model draws must not depend on what was compiled.
            generator = torch.Generator().manual_seed(turn)
            operands = {m: self._random(m, generator) for m in r.leaves if m not in self.documents}
            drawn = reading and self._documents(reading, b, t, generator)
            failed = self._compared(operands, nodes, b, t, h, p, n, drawn)
            if failed is None and drawn is not None:
                louder = self._louder(operands, nodes, b, t, drawn)
                if self._compared(louder, nodes, b, t, h, p, n, drawn, drawn.before()) is not None:
                    reason = "what comes before a document is made small in it, not nothing: exp(-1000) is nothing"
                    failed = NoScan(self.root, "documents", reason, 6)
            if failed is not None:
                return failed
        r.fix()
        made = {k: r.leaf(m) for k, m in nodes.items()}
        y_leaf, *finals = map(r.leaf, (self.root, *self.exports))
        documents = [*map(r.leaf, self.documents)]
        inside = {m for m in r.nodes if not self.algebra.is_mask(m)}
        return Scan(
            y_leaf, finals, made["x"], made["dt"], made["A"], made["B"], made["C"], made.get("D"),
            made.get("initial_state"), b, t, h, p, n, self._chunk(t), inside, documents[0] if documents else None,
            reading,
        )  # fmt: skip

    def _random(self, m: Node, generator: torch.Generator) -> Tensor:
        """Steps over 0 and rates below, as every model's: of a state that grew, what is small would not show."""
        shape = self.r.shape(self.r.of(m))
        if m in (self.dt, self.rate):
            drawn = torch.rand(shape, dtype=torch.float64, device="cpu", generator=generator)
            return drawn if m is self.dt else -RATE * drawn
        return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)

    def _compared(
        self, operands: dict[Node, Tensor], nodes: dict[str, Node], b: Dim, t: Dim, h: Dim, p: Dim, n: Dim,
        documents: Documents | None, aside: Tensor | None = None,
    ) -> NoScan | None:  # fmt: skip
        """Why what is computed of `operands` is not what the recurrence makes of them, but `aside` [b, t]; or None."""
        r = self.r
        told = {} if documents is None else dict.fromkeys(self.documents, documents.leaf)
        y, *states = r.run({**operands, **told}, [self.root, *self.exports])
        given = [
            None if k not in nodes else arranged(r.axes, operands[nodes[k]], r.of(nodes[k]), target)
            for k, target in (
                ("x", [b, t, h, p]), ("dt", [b, t, h]), ("A", [h]), ("B", [b, t, h, n]), ("C", [b, t, h, n]),
                ("D", [h]), ("initial_state", [b, h, p, n]),
            )
        ]  # fmt: skip
        begins = None if documents is None else documents.begins
        want, state = recurrence(*given, begins=begins)  # type: ignore[arg-type]
        got = arranged(r.axes, y, r.of(self.root), [b, t, h, p])
        if aside is not None:
            got, want = (one.masked_fill(aside[..., None, None], 0) for one in (got, want))
        if not agree(got, want, TOLERANCE):
            return NoScan(self.root, "differs", "what is computed is no scan of its operands", 5)
        for final, found in zip(self.exports, states, strict=True):
            target, dims = [b, h, p, n], r.of(final)
            same = {a for d in dims for a in d} == {a for d in target for a in d}
            if not same or not agree(arranged(r.axes, found, dims, target), state, TOLERANCE):
                return NoScan(final, "escapes", "an intermediate of the scan is used elsewhere too", 6)
        return None

    def _documents(self, reading: Reading, b: Dim, t: Dim, generator: torch.Generator) -> Documents:
        """Documents that begin here and there."""
        axes, dims = self.r.axes, self.r.of(self.documents[0])
        atoms = [a for d in dims for a in d]
        others = [a for a in atoms if a not in t]
        NoAxes.when(
            not set(t) <= set(atoms) <= {*b, *t} or len(set(atoms)) != len(atoms),
            "what tells documents apart is not a number or a flag for each token",
        )
        begins = torch.rand(axes.size(others), axes.size(t), dtype=torch.float64, generator=generator) < BEGINS
        if not reading.flags:
            begins[:, 0] = False  # there is no number before the first
        leaf = arranged(axes, reading.drawn(begins), [others, t], dims)
        return Documents(arranged(axes, begins, [others, t], [b, t]), leaf)

    def _louder(
        self, operands: dict[Node, Tensor], nodes: dict[str, Node], b: Dim, t: Dim, documents: Documents
    ) -> dict[Node, Tensor]:
        """`operands`, where x and the initial state are so large before a row's last document that nothing of them may
        reach it."""
        louder, before = dict(operands), documents.before()
        for name, at, dims in (("x", before, [b, t]), ("initial_state", documents.begins.any(1), [b])):
            node = nodes.get(name)
            if node is not None and {a for d in dims for a in d} <= set(self.r.atoms(node)):
                factor = torch.where(at, LOUD, 1).double()
                louder[node] = operands[node] * arranged(self.r.axes, factor, dims, self.r.of(node))
        return louder

    def _chunk(self, t: Dim) -> int:
        """The size of the model's chunks: the tokens' inner dimension, perhaps once they are padded. Of a symbolic one
        its hint, as of tokens over their chunks' count, which is one number for all that guards allow; 0 without."""
        padded = [flat(eq.whole) for eq in self.r.axes.lengths if [flat(d) for d in eq.parts] == [t]]
        size = next((d[-1].size for d in (t, *padded) if len(d) > 1), next((d[-1].size for d in (*padded, t) if d), 1))
        return size if isinstance(size, int) else int(size.node.hint or 0)


def arranged(axes: AxisEquations, t: Tensor, dims: list[Dim], target: list[Dim]) -> Tensor:
    """`t` with dimensions `dims` as a tensor of `target`'s, repeated along atoms it does not have."""
    have = [a for d in dims for a in d]
    t = t.reshape([axes.sizes[a] for a in have])
    want = [a for d in target for a in flat(d)]
    t = t.permute([have.index(a) for a in want if a in have])
    t = t.reshape([axes.sizes[a] if a in have else 1 for a in want]).expand([axes.sizes[a] for a in want])
    return t.reshape([axes.size(d) for d in target])


def recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor | None,
    *, begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the last state, position by position; B and C by head. The state starts anew where `begins` [b, t]."""
    b, t, h, p = x.shape
    state = x.new_zeros(b, h, p, B.shape[-1]) if state is None else state
    y = []
    for i in range(t):
        added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, i], x[:, i], B[:, i])
        if begins is not None:
            state = state.masked_fill(begins[:, i, None, None, None], 0)
        state = (dt[:, i] * A).exp()[..., None, None] * state + added
        y.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]))
    out = torch.stack(y, 1)
    return out if D is None else out + D[:, None] * x, state
