"""Mamba-2's chunked scan (state-space dual, arXiv:2405.21060), found by what it computes.

    state_t = exp(dt_t * A) * state_{t-1} + dt_t * outer(x_t, B_t);    y_t = state_t @ C_t + D * x_t

People write it as broadcast products, einsums, batched products, with segment sums or differences of prefix sums, with
loops over chunks, padded or not. What they share is decays: exponentials of sums of `dt * A` over consecutive
positions. From a decay the subgraph is grown to a candidate for y; its leaves get roles by the dimensions they have;
and then it is run at small sizes on random operands beside the recurrence above (`resized.py`). What agrees there is
the scan, however it is written; what does not is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile.graph_edit import value
from megacpp_compile.recognise.axes import Axes, Dim, NoAxes, flat
from megacpp_compile.recognise.resized import (
    CONDITION,
    CREATION,
    LIKE,
    MASKS,
    REPEATS,
    RULES,
    SAME,
    VIEWS,
    Resized,
    whole,
)

aten = torch.ops.aten
CONTRACTIONS = {aten.matmul.default, aten.bmm.default, aten.einsum.default}
UNIT = {aten.unsqueeze.default}
EXPONENTIALS = {aten.exp.default, aten.exp2.default}
TOLERANCE = 1e-8  # float64, a few hundred operations
MOST_CANDIDATES, MOST_OPERANDS = 40, 7


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An operand of the scan: `node`, and the atoms of each of its dimensions."""

    node: Node
    dims: tuple[tuple[object, ...], ...]


@dataclasses.dataclass
class Scan:
    """A scan proved. Groups of atoms: b batch, t tokens, h heads, p channels, n states; `groups` leads h."""

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


@dataclasses.dataclass(frozen=True)
class NoScan:
    """Why something with a scan's decays is none. `stage`: how far it got, the furthest being the best reason."""

    node: Node
    tag: str
    reason: str
    stage: int = 0


class Algebra:
    """Which nodes of a graph are tensor algebra, and which of them are constants."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: set[Node] = set()
        self.constants: set[Node] = set()
        for n in graph.nodes:
            if n.op != "call_function" or n.target not in RULES:
                continue
            inputs = tensors(n)
            constant = n.target in CREATION | LIKE or bool(inputs) and all(a in self.constants for a in inputs)
            condition = CONDITION.get(n.target)
            data = n.target in MASKS or condition is not None and n.args[condition] not in self.constants
            if constant:
                self.constants.add(n)
            elif data or not _float(n):
                continue
            self.nodes.add(n)

    def inputs(self, n: Node) -> list[Node]:
        """What the value of `n` depends on; a constant, and what only lends its shape, is not."""
        return [] if n in self.constants else [a for a in tensors(n) if a not in self.constants]

    def behind(self, roots: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
        """Everything `roots` are made of by algebra, themselves and the operands it begins with included."""
        stops, found, pending = set(stop), set[Node](), list(roots)
        while pending:
            n = pending.pop()
            if n in found:
                continue
            found.add(n)
            if n in self.nodes and n not in stops:
                pending += self.inputs(n)
        return found

    def ahead(self, root: Node) -> list[Node]:
        """Everything algebra makes of `root`, in graph order."""
        found, pending = {root}, [root]
        while pending:
            for user in pending.pop().users:
                if user in self.nodes and user not in self.constants and user not in found:
                    found.add(user)
                    pending.append(user)
        return sorted(found)

    def source(self, n: Node) -> Node:
        """What `n` is a view, a repetition or an exact cast of."""
        while self.passes_on(n):
            n = n.args[0]  # type: ignore[assignment]
        return n

    def passes_on(self, n: Node) -> bool:
        if n not in self.nodes or n in self.constants or n.target not in SAME | VIEWS | REPEATS and not whole(n):
            return False
        source = n.args[0]
        assert isinstance(source, Node)
        have, made = value(source).dtype, value(n).dtype
        return have.is_floating_point and torch.promote_types(have, made) == made


def tensors(n: Node) -> list[Node]:
    """The inputs of `n` that are tensors, or several; sizes are not."""
    return [a for a in n.all_input_nodes if isinstance(value(a), (torch.Tensor, tuple, list))]


def _float(n: Node) -> bool:
    values = value(n)
    values = values if isinstance(values, (tuple, list)) else [values]
    return all(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def find_scans(graph: fx.Graph) -> Iterator[Scan | NoScan]:
    """Every scan of `graph`, and everything that has a scan's decays and is none, in graph order."""
    if not any(n.target in EXPONENTIALS for n in graph.nodes):
        return
    algebra = Algebra(graph)
    done: set[Node] = set()
    for n in graph.nodes:
        if n in done or not _is_decay(algebra, n):
            continue
        found = _scan_of(algebra, n)
        if isinstance(found, Scan):
            done |= found.inside
        else:
            done |= set(algebra.ahead(n))
            done |= {e for a in algebra.ahead(n) for e in algebra.behind([a]) if e.target in EXPONENTIALS}
        yield found


def _is_decay(algebra: Algebra, n: Node) -> bool:
    """An exponential of sums over consecutive positions."""
    if n.target not in EXPONENTIALS or n not in algebra.nodes or n in algebra.constants:
        return False
    made_of = algebra.behind([n])
    if any(m.target is aten.cumsum.default for m in made_of):
        return True
    return any(m.target in CONTRACTIONS and set(tensors(m)) & algebra.constants for m in made_of)


def _scan_of(algebra: Algebra, decay: Node) -> Scan | NoScan:
    """The scan that `decay` is part of: the last node in which everything it is made of is one."""
    best = NoScan(decay, "no-scan", "decays over consecutive positions, but nothing made of them is a scan")
    ahead = [n for n in algebra.ahead(decay) if isinstance(value(n), torch.Tensor) and value(n).dim() > 1]
    for root in list(reversed(ahead))[-MOST_CANDIDATES:]:
        try:
            found = _scan_at(algebra, root, decay)
        except NoAxes as e:
            found = NoScan(root, "axes", str(e), 2)
        if isinstance(found, Scan):
            return found
        if found.stage > best.stage:
            best = found
    return best


def _scan_at(algebra: Algebra, root: Node, decay: Node) -> Scan | NoScan:
    everything = algebra.behind([root])
    decays = [n for n in everything if _is_decay(algebra, n)]
    exponents = algebra.behind(a for e in decays for a in algebra.inputs(e))
    added = algebra.behind([root], stop=decays)
    shared = [n for n in exponents & added if n not in algebra.constants]
    if not shared:
        return NoScan(decay, "no-step", "what the state takes in is not multiplied by the step of its decay", 1)
    dt = max(shared)
    dt, steps = _leaf(algebra, dt)
    carrying = algebra.behind([root], stop=[dt]) & set(algebra.ahead(dt)) - {dt}
    cut = _Cut(algebra, carrying, dt)
    cut.inside |= steps
    leaves = cut.leaves(root)
    if isinstance(leaves, NoScan):
        return leaves
    rates = [n for n in leaves if n in cut.from_exponents(decays) and n is not dt]
    if len(rates) != 1:
        return NoScan(decay, "rate", f"the logarithm of the decay is a step times {len(rates) or 'no'} rates", 2)
    operands = [n for n in leaves if n not in (dt, rates[0])]
    if len(operands) > MOST_OPERANDS - 2:
        return NoScan(root, "roles", "it has more operands than a scan", 2)
    exports, shown = _exports(algebra, carrying, cut.inside, leaves, dt, root)
    resized = Resized(sorted(cut.inside | shown), [dt, *operands, rates[0]])
    return _Roles(algebra, resized, root, dt, rates[0], operands, exports).scan()


def _exports(
    algebra: Algebra, carrying: set[Node], inside: set[Node], operands: list[Node], dt: Node, root: Node
) -> tuple[list[Node], set[Node]]:
    """(what leaves the scan beside y, what it takes to make that): to be the state at its end."""
    known, shown = inside | set(operands) | algebra.constants, set[Node]()
    for n in sorted(algebra.nodes - known):
        if root not in n.all_input_nodes and set(tensors(n)) <= known | shown:
            shown.add(n)
    exports = []
    for n in sorted((carrying | shown & set(algebra.ahead(dt))) - {root}):
        if any(u not in inside and u not in shown and not _lends_shape(algebra, u, n) for u in n.users):
            exports.append(n)
    shown &= algebra.behind(exports)
    return exports, shown | {c for n in shown for a in tensors(n) for c in _constants(algebra, a)}


def _leaf(algebra: Algebra, n: Node) -> tuple[Node, set[Node]]:
    """(the operand to read instead of `n`, the nodes between): through padding, repetition, casts and new dimensions,
    but not through other views alone, which cost nothing."""
    chain, at = [n], n
    while algebra.passes_on(at):
        at = at.args[0]  # type: ignore[assignment]
        chain.append(at)
    keep = max((i + 1 for i, m in enumerate(chain[:-1]) if m.target not in VIEWS - UNIT), default=0)
    return chain[keep], set(chain[:keep])


class _Cut:
    """Where the scan's operands are: what its steps (`dt`) reach is inside, and what meets that is followed to the
    operands: C . B^T, and D * x where x is one."""

    def __init__(self, algebra: Algebra, carrying: set[Node], dt: Node) -> None:
        self.algebra, self.dt, self.inside = algebra, dt, set(carrying)
        self.found: dict[Node, None] = {dt: None}

    def leaves(self, root: Node) -> list[Node] | NoScan:
        carrying = set(self.inside)
        skips = []
        for n in sorted(carrying):
            for a in tensors(n):
                if a in carrying or a is self.dt:
                    continue
                if a.target in (aten.mul.Tensor,) and n.target in (aten.add.Tensor,) and a in self.algebra.nodes:
                    skips.append(a)
                else:
                    self.descend(a)
        for a in skips:
            known = {self.algebra.source(n) for n in self.found}
            if any(self.algebra.source(b) in known for b in tensors(a)):
                self.inside.add(a)
                for b in tensors(a):
                    self.descend(b)
            else:
                self.descend(a)
        return self._one_of_each()

    def descend(self, n: Node, summed: bool = False) -> None:
        """Follow `n`, which no step reaches, to operands; `summed`: its last sum is still to come."""
        algebra = self.algebra
        if n in self.inside or n in self.found:
            return
        if n in algebra.constants:
            self.inside |= _constants(algebra, n)
            return
        at, between = self._through(n)
        inputs = [a for a in tensors(at) if a not in algebra.constants]
        mixes = at in algebra.nodes and (
            at.target in CONTRACTIONS
            and len(inputs) == 2
            or at.target is aten.sum.dim_IntList
            or summed
            and at.target is aten.mul.Tensor
            and len(inputs) == 2
            or len(inputs) == 1
            and len(tensors(at)) == 2
        )
        if mixes:
            self.inside |= {at} | between
            for a in tensors(at):
                self.descend(a, at.target is aten.sum.dim_IntList or summed and len(inputs) == 1)
            return
        leaf, between = _leaf(algebra, n)
        self.inside |= between
        self.found[leaf] = None

    def _whole(self, n: Node) -> tuple[Node, set[Node]]:
        """What `n` is an element of, with the nodes between."""
        source, between = self._through(n)
        if source.target is aten.select.int and source in self.algebra.nodes:
            whole, others = self._through(source.args[0])  # type: ignore[arg-type]
            return whole, between | {source} | others
        return source, set()

    def _through(self, n: Node) -> tuple[Node, set[Node]]:
        between = set()
        while self.algebra.passes_on(n):
            between.add(n)
            n = n.args[0]  # type: ignore[assignment]
        return n, between

    def from_exponents(self, decays: list[Node]) -> set[Node]:
        pending, seen = list(decays), set[Node]()
        while pending:
            n = pending.pop()
            if n in seen:
                continue
            seen.add(n)
            if n in self.inside and n not in self.found:
                pending += tensors(n)
        return seen & set(self.found)

    def _one_of_each(self) -> list[Node]:
        """Leaves, one for each source: where two views of one tensor are read, that tensor."""
        by_source: dict[Node, list[Node]] = {}
        picked = len(self.found) > MOST_OPERANDS  # chunks are read one by one, in a loop
        for leaf in self.found:
            source, between = self._whole(leaf) if picked else (self.algebra.source(leaf), set())
            if between:
                self.inside |= between
            by_source.setdefault(source, []).append(leaf)
        chosen = []
        for source, leaves in by_source.items():
            if len(leaves) > 1:
                for leaf in leaves:
                    at, between = self._through(leaf)
                    self.inside |= between
            chosen.append(leaves[0] if len(leaves) == 1 and source is self.algebra.source(leaves[0]) else source)
        self.inside |= {c for n in list(self.inside) for a in tensors(n) for c in _constants(self.algebra, a)}
        self.inside -= set(chosen)
        return chosen


def _constants(algebra: Algebra, n: Node) -> set[Node]:
    """`n` and what it is made of, where it is a constant."""
    found, pending = set[Node](), [n]
    while pending:
        m = pending.pop()
        if m in algebra.constants and m not in found:
            found.add(m)
            pending += tensors(m) if m.target not in CREATION | LIKE else []
    return found


def _lends_shape(algebra: Algebra, reader: Node, read: Node) -> bool:
    """Whether `reader` reads only the shape and dtype of `read`: a size, or a constant like it."""
    if not isinstance(value(reader), (torch.Tensor, tuple, list)):
        return reader.op != "output"
    if reader.target in LIKE | CREATION and reader.args[0] is read:
        return True
    return reader in algebra.nodes and all(_lends_shape(algebra, u, reader) for u in reader.users)


class _Roles:
    """Which leaf is which operand: by atoms where they tell, by trial where they do not."""

    def __init__(
        self, algebra: Algebra, resized: Resized, root: Node, dt: Node, rate: Node, operands: list[Node],
        exports: list[Node],
    ) -> None:  # fmt: skip
        self.algebra, self.r, self.root, self.dt, self.rate = algebra, resized, root, dt, rate
        self.operands, self.exports = operands, exports

    def atoms(self, n: Node) -> Dim:
        return [a for d in self.r.of(n) for a in d]

    def scan(self) -> Scan | NoScan:
        r, dt, made = self.r, self.dt, self.atoms(self.root)
        if len(set(made)) != len(made):
            return NoScan(self.root, "roles", "a dimension of the result occurs twice", 2)
        steps, heads = self.atoms(dt), self.atoms(self.rate)
        if not set(heads) <= set(steps) or not set(steps) <= set(made):
            return NoScan(self.rate, "rate", "the rate of the decay is not one number for each head", 3)
        p = [a for a in made if a not in steps]
        outer = [d for d in r.of(dt) if not set(d) & set(heads)]
        best: NoScan = NoScan(self.root, "roles", "its operands are not those of a scan", 3)
        for t in [*reversed(outer), []]:
            b = [a for a in steps if a not in heads and a not in t]
            for roles in self._assignments(b, t, heads, p):
                try:
                    found = self._try(roles, b, t, heads, p)
                except NoAxes as e:
                    found = NoScan(self.root, "axes", str(e), 5)
                if isinstance(found, Scan):
                    return found
                if found.stage > best.stage:
                    best = found
        return best

    def _assignments(self, b: Dim, t: Dim, h: Dim, p: Dim) -> Iterator[dict[str, Node]]:
        """Operands as x, B, C and perhaps D and an initial state, where dimensions allow it."""
        known = {*b, *t, *h, *p}
        timed = [n for n in self.operands if set(self.atoms(n)) & set(t) or not t]
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
            if any(len(self.atoms(n)) != len(set(self.atoms(n))) for n in roles.values()):
                continue
            x, B, C = (set(self.atoms(roles[k])) for k in ("x", "B", "C"))
            n = B - known
            if not set(p) <= x <= known or C - known != n or (B | C) & set(p):
                continue
            if "D" in roles and not set(self.atoms(roles["D"])) <= set(h):
                continue
            if "initial_state" in roles and not set(self.atoms(roles["initial_state"])) <= {*b, *h, *p, *n}:
                continue
            yield roles

    def _try(self, roles: dict[str, Node], b: Dim, t: Dim, h: Dim, p: Dim) -> Scan | NoScan:
        r = self.r
        n = [a for a in self.atoms(roles["B"]) if a not in {*b, *t, *h, *p}]
        nodes = {"dt": self.dt, "A": self.rate, **roles}
        for turn in (0, 1):
            r.solve(turn)
            operands = {m: _random(r.shape(r.of(m)), m is self.dt) for m in r.leaves}
            y, *states = r.run(operands, [self.root, *self.exports])
            given = [
                None if k not in nodes else arranged(r.axes, operands[nodes[k]], r.of(nodes[k]), target)
                for k, target in (
                    ("x", [b, t, h, p]), ("dt", [b, t, h]), ("A", [h]), ("B", [b, t, h, n]), ("C", [b, t, h, n]),
                    ("D", [h]), ("initial_state", [b, h, p, n]),
                )
            ]  # fmt: skip
            want, state = recurrence(*given)  # type: ignore[arg-type]
            got = arranged(r.axes, y, r.of(self.root), [b, t, h, p])
            if not _equal(got, want):
                return NoScan(self.root, "differs", "what is computed is no scan of its operands", 5)
            for final, found in zip(self.exports, states, strict=True):
                target, dims = [b, h, p, n], r.of(final)
                same = {a for d in dims for a in d} == {a for d in target for a in d}
                if not same or not _equal(arranged(r.axes, found, dims, target), state):
                    return NoScan(final, "escapes", "an intermediate of the scan is used elsewhere too", 6)
        made = {k: Leaf(m, tuple(tuple(d) for d in r.of(m))) for k, m in nodes.items()}
        y_leaf, *finals = (Leaf(m, tuple(tuple(d) for d in r.of(m))) for m in (self.root, *self.exports))
        return Scan(
            y_leaf, finals, made["x"], made["dt"], made["A"], made["B"], made["C"], made.get("D"),
            made.get("initial_state"), b, t, h, p, n, self._chunk(t), set(r.nodes),
        )  # fmt: skip

    def _chunk(self, t: Dim) -> int:
        """The size of the model's chunks: the tokens' inner dimension, perhaps once they are padded."""
        padded = [flat(eq.whole) for eq in self.r.axes.lengths if [flat(d) for d in eq.parts] == [t]]
        size = next((d[-1].size for d in (t, *padded) if len(d) > 1), next((d[-1].size for d in (*padded, t) if d), 1))
        return size if isinstance(size, int) else 0


def _random(shape: list[int], positive: bool) -> Tensor:
    made = torch.randn(shape, dtype=torch.float64)
    return made.abs() if positive else made


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def arranged(axes: Axes, t: Tensor, dims: list[Dim], target: list[Dim]) -> Tensor:
    """`t` with dimensions `dims` as a tensor of `target`'s, repeated along atoms it does not have."""
    have = [a for d in dims for a in d]
    t = t.reshape([axes.sizes[a] for a in have])
    want = [a for d in target for a in flat(d)]
    t = t.permute([have.index(a) for a in want if a in have])
    t = t.reshape([axes.sizes[a] if a in have else 1 for a in want]).expand([axes.sizes[a] for a in want])
    return t.reshape([axes.size(d) for d in target])


def recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y and the last state, position by position; B and C by head."""
    b, t, h, p = x.shape
    state = x.new_zeros(b, h, p, B.shape[-1]) if state is None else state
    y = []
    for i in range(t):
        added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, i], x[:, i], B[:, i])
        state = (dt[:, i] * A).exp()[..., None, None] * state + added
        y.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]))
    out = torch.stack(y, 1)
    return out if D is None else out + D[:, None] * x, state
