"""Linear recurrences of a state that a graph holds unrolled: `state = state * decay + update`, once for every step.

Which of the known ones it is shows in the decay and the update: the delta rule (arXiv:2412.06464) writes a correction
of what the state itself predicts; lightning attention (arXiv:2401.04658) forgets at a rate nothing computes; Mamba-1's
selective scan (arXiv:2312.00752) has a rate for every channel and state, times the step, in an exponential. There is no
lowering for these; the report and remat know them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Iterable, Iterator

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.views import is_cast
from megacpp_compile.matchers.moe.gate_matrix import is_filled
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, REPEATS, VIEWS

aten = torch.ops.aten
NAMES = {
    "gated-delta-rule": "Gated DeltaNet",
    "lightning-attention": "lightning attention",
    "selective-scan": "Mamba-1's selective scan",
}
_SUMS = (aten.sum.dim_IntList,)
_READS = (*VIEWS, *REPEATS, aten.select.int, aten.slice.Tensor, aten.index.Tensor, operator.getitem, aten.unbind.int,
          aten.split.Tensor)  # fmt: skip
_STEPS = 12  # nodes between a state and what is made of it


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """`node`: the last state; `steps`: how often it was updated; `kind`: a key of NAMES, or "" for another one."""

    node: Node
    kind: str
    steps: int


@dataclasses.dataclass(frozen=True)
class _Update:
    """`node = state * decay + added`; `steps`: how many updates led here, this one included."""

    node: Node
    state: Node
    decay: Node
    added: Node
    steps: int


def find_recurrences(nodes: Iterable[Node], computed: Container[Node] | None = None) -> Iterator[Recurrence]:
    """Every recurrence among `nodes`, which are in graph order. computed: what depends on the model's weights; without
    it, lightning attention is one of the others."""
    updates: dict[Node, _Update] = {}
    solved: dict[Node, Node] = {}  # one of each system
    for node in nodes:
        if (update := _update(node, updates)) is not None:
            updates[node] = update
        elif _solves_a_chunk(node):
            solved.setdefault(node.args[0], node)  # type: ignore[arg-type]
    earlier = {u.state for u in updates.values()}
    for node, update in updates.items():
        if node not in earlier and (kind := _kind(update, computed)) is not None:
            yield Recurrence(node, kind, update.steps)
            for system, solution in list(solved.items()):
                if _depends(update.added, solution):
                    del solved[system]
    for solution in solved.values():
        yield Recurrence(solution, "gated-delta-rule", 1)


def _solves_a_chunk(node: Node) -> bool:
    """Whether `node` solves the delta rule within a chunk: a triangular system of products of keys and of decays. With
    a single chunk that is all there is to see, as nothing reads the state behind it."""
    if node.target is not aten.linalg_solve_triangular.default or not isinstance(node.args[0], Node):
        return False
    system = list(_within(node.args[0]))
    return any(_contracts(n) for n in system) and any(n.target is aten.exp.default for n in system)


def _update(node: Node, updates: dict[Node, _Update]) -> _Update | None:
    if node.target is not aten.add.Tensor or node.kwargs or not _is_state(node):
        return None
    found = None
    for decayed, added in (node.args, node.args[::-1]):
        decayed, added = _uncast(decayed), _uncast(added)
        if not isinstance(decayed, Node) or decayed.target is not aten.mul.Tensor or not isinstance(added, Node):
            continue
        for state, decay in (decayed.args, decayed.args[::-1]):
            state = _uncast(state)
            if not isinstance(state, Node) or not isinstance(decay, Node) or not _is_state(state):
                continue
            if not all(map(same_size, value(state).shape, value(node).shape)):
                continue
            if state in updates:
                return _Update(node, state, decay, added, updates[state].steps + 1)
            if is_filled(state, 0.0):
                return _Update(node, state, decay, added, 1)
            found = found or _Update(node, state, decay, added, 1)
    return found


def _is_state(node: Node) -> bool:
    fake = value(node)
    return isinstance(fake, torch.Tensor) and fake.dim() >= 3 and fake.is_floating_point()


def _uncast(node: object) -> object:
    while isinstance(node, Node) and is_cast(node):
        node = node.args[0]
    return node


def _kind(last: _Update, computed: Container[Node] | None) -> str | None:
    if (last.steps > 1 or is_filled(last.state, 0.0)) and _corrects(last):
        return "gated-delta-rule"
    if last.steps < 2 or _depends(last.added, last.state):
        return None  # a residual stream, for one
    if _rate_of_each_channel(last.decay):
        return "selective-scan"
    if not _contracts(last.added):
        return None
    return "lightning-attention" if computed is not None and last.decay not in computed else ""


def _algebra(node: Node) -> bool:
    return node.target in (aten.mul.Tensor, aten.mul.Scalar, *_SUMS, *_READS, *CONTRACTIONS) or is_cast(node)


def _corrects(update: _Update) -> bool:
    """Whether what is added is a product with `v - (a product with the state)`."""
    for node in _within(update.added):
        if node.target is aten.sub.Tensor and isinstance(node.args[1], Node):
            predicted = list(_within(node.args[1]))
            if update.state in predicted and any(_contracts(n) for n in predicted):
                return True
    return False


def _within(node: Node) -> Iterator[Node]:
    """`node` and the values it is computed from by products, contractions and views; other ops end the walk."""
    seen, pending = {node}, [(node, _STEPS)]
    while pending:
        node, left = pending.pop()
        yield node
        if _algebra(node) and left:
            new = [a for a in node.all_input_nodes if a not in seen]
            seen.update(new)
            pending += [(a, left - 1) for a in new]


def _contracts(node: Node) -> bool:
    return any(n.target in (*CONTRACTIONS, *_SUMS) for n in _through_views(node))


def _through_views(node: Node) -> Iterator[Node]:
    yield node
    while (node.target in _READS or is_cast(node)) and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def _depends(node: Node, on: Node) -> bool:
    seen, pending = {node}, [node]
    while pending:
        node = pending.pop()
        if node is on:
            return True
        new = [a for a in node.all_input_nodes if a not in seen and not a < on]
        seen.update(new)
        pending += new
    return False


def _rate_of_each_channel(decay: Node) -> bool:
    """Whether `decay` is one position of `exp(rate * step)`: the rate alone differs over the states, the step alone
    over positions."""
    *_, power = _through_views(decay)
    if power.target is not aten.exp.default:
        return False
    product = _uncast(power.args[0])
    if not isinstance(product, Node) or product.target is not aten.mul.Tensor:
        return False
    sides: list[Node] = [a for a in product.args if isinstance(a, Node)]
    if not of_tensors(product):
        return False
    shapes = [[1] * (value(product).dim() - value(a).dim()) + list(value(a).shape) for a in sides]
    own = [{i for i, n in enumerate(s) if not (isinstance(n, int) and n == 1)} for s in shapes]
    # each has a dimension of its own, and both have the channels
    return all(o - other for o, other in (own, own[::-1])) and bool(own[0] & own[1])
