"""Linear recurrences of a state that a graph holds unrolled: `state = state * decay + update`, once for every step.

Which of the known ones it is shows in the decay and the update: the delta rule (arXiv:2412.06464) writes a correction
of what the state itself predicts; lightning attention (arXiv:2401.04658) forgets at a rate nothing computes; Mamba-1's
selective scan (arXiv:2312.00752) has a rate for every channel and state, times the step, in an exponential. RWKV
(arXiv:2305.13048, 2404.05892, 2503.14456) decays a numerator and its denominator alike, or reads the state beside what
is about to enter it times a bonus, or turns the state by a product of rank one. The RG-LRU (arXiv:2402.19427) decays
each channel by a power that a sigmoid gates. What is found here after the passes has no lowering; the report and remat
know it.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import long_dimensions, of_tensors, same_size, value
from megacpp_compile.fx.filled import is_filled
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.views import is_cast, uncast
from megacpp_compile.fx.walks import ancestors, within_steps
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, REPEATS, VIEWS
from megacpp_compile.reader.links import chain
from megacpp_compile.reader.products import BROADCAST, contraction

NAMES = {
    "gated-delta-rule": "Gated DeltaNet",
    "lightning-attention": "lightning attention",
    "rg-lru": "RG-LRU",
    "rwkv": "RWKV's time mixing",
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
    """`node = state * decay + added`, or `+ added` and another value; `steps`: how many updates led here, this one
    included."""

    node: Node
    state: Node
    decay: Node
    added: Node
    steps: int
    whole: bool = True


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
    last = {node: update for node, update in updates.items() if node not in earlier}
    weighted = _weighted_sums(last.values())
    longest = {_first(u, updates): u for u in sorted(weighted, key=lambda u: u.steps)}  # each step may branch off
    for node, update in last.items():
        kind = "rwkv" if update in longest.values() else None if update in weighted else _kind(update, computed)
        if kind is not None:
            yield Recurrence(node, kind, update.steps)
            for system, solution in list(solved.items()):
                if _depends(update.added, solution):
                    del solved[system]
    for solution in solved.values():
        yield Recurrence(solution, "gated-delta-rule", 1)


def single_steps(nodes: Iterable[Node]) -> Iterator[Node]:
    """States that the delta rule updates by one token and that no other update leads to, as in decoding."""
    updates: dict[Node, _Update] = {}
    for node in nodes:
        if (update := _update(node, updates)) is not None:
            updates[node] = update
    earlier = {u.state for u in updates.values()}
    for node, update in updates.items():
        if update.steps == 1 and node not in earlier and update.whole and not is_filled(update.state, 0.0):
            if _corrects(update, of_one_token=True):
                yield node


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
    inner = [(a, b) for a, b in _pairs(node) if _is_sum(a)]
    for whole, (decayed, added) in (
        *((True, p) for p in _pairs(node)), *((False, (one, b)) for a, b in inner for one, _ in _pairs(a)),
    ):  # fmt: skip
        if not isinstance(decayed, Node) or decayed.target is not aten.mul.Tensor or not isinstance(added, Node):
            continue
        for state, decay in (decayed.args, decayed.args[::-1]):
            state = uncast(state)
            if not isinstance(state, Node) or not isinstance(decay, Node) or not _is_state(state):
                continue
            if not all(map(same_size, value(state).shape, value(node).shape)):
                continue
            if state in updates:
                return _Update(node, state, decay, added, updates[state].steps + 1, whole)
            if is_filled(state, 0.0):
                return _Update(node, state, decay, added, 1, whole)
            found = found or _Update(node, state, decay, added, 1, whole)
    return found


def _pairs(node: Node) -> list[tuple[Any, Any]]:
    a, b = (uncast(x) for x in node.args)
    return [(a, b), (b, a)]


def _is_sum(node: object) -> bool:
    return isinstance(node, Node) and node.target is aten.add.Tensor and not node.kwargs


def _is_state(node: Node) -> bool:
    fake = value(node)
    return isinstance(fake, torch.Tensor) and fake.dim() >= 2 and fake.is_floating_point()


@or_none
def _kind(last: _Update, computed: Container[Node] | None) -> str | None:
    if not last.whole:
        return "rwkv" if last.steps > 1 and _turns_by_rank_one(last) else None
    if (last.steps > 1 or is_filled(last.state, 0.0)) and _corrects(last):
        return "gated-delta-rule"
    NoMatch.when(last.steps < 2)
    NoMatch.when(_depends(last.added, last.state))  # a residual stream, for one
    if _gated_power(last):
        return "rg-lru"
    NoMatch.when(value(last.node).dim() < 3)
    if _reads_with_a_bonus(last):
        return "rwkv"
    if _rate_of_each_channel(last.decay):
        return "selective-scan"
    NoMatch.when(not _contracts(last.added))
    return "lightning-attention" if computed is not None and last.decay not in computed else ""


def _weighted_sums(last: Iterable[_Update]) -> set[_Update]:
    """Sums that are weighted with exponentials: beside each is the sum of the weights, which decays alike."""
    by_decay = by_key(((uncast(update.decay), update.steps), update) for update in last)
    found = set()
    for updates in by_decay.values():
        for under, over in itertools.permutations(updates, 2):
            product = over.added
            factors = [uncast(a) for a in product.args] if product.target is aten.mul.Tensor else []
            *_, weight = _through_views(under.added)
            same = [_alike(under.added, f) for f in factors].count(True) == 1  # no square
            if under.steps > 1 and same and weight.target is aten.exp.default:
                found.add(over)
    return found


def _first(update: _Update, updates: dict[Node, _Update]) -> Node:
    while update.state in updates:
        update = updates[update.state]
    return update.node


def _alike(a: Any, b: Any) -> bool:
    """Whether `a` and `b` are one value, or the same view of one."""
    a, b = uncast(a), uncast(b)
    if a is b or not isinstance(a, Node) or not isinstance(b, Node):
        return a is b
    return a.target is b.target and a.target in _READS and a.args[1:] == b.args[1:] and _alike(a.args[0], b.args[0])


def _reads_with_a_bonus(update: _Update) -> bool:
    """Whether the state before the update is read in a sum with a multiple of what the update adds."""
    sums = [user for user in update.state.users if _is_sum(user) and user is not update.node]
    beside = [b for user in sums for a, b in _pairs(user) if a is update.state]
    return any(_alike(update.added, f) for b in beside for f in _factors(b))


def _factors(node: Any) -> list[Any]:
    """The factors of a product, taken apart twice."""
    outer = [uncast(a) for a in node.args] if isinstance(node, Node) and node.target is aten.mul.Tensor else []
    inner = [a for f in outer if isinstance(f, Node) and f.target is aten.mul.Tensor for a in f.args]
    return [*outer, *map(uncast, inner)]


def _turns_by_rank_one(update: _Update) -> bool:
    """Whether a sum of the state's decay, the state times a product of two vectors, and another such product is all of
    the update."""
    parts = _parts(update.node)
    own = [p for p in parts if update.state in _within(p)]
    turned = [p for p in own if any(_contracts(n) and update.state in _within(n) for n in _within(p))]
    return (len(parts), len(own), len(turned)) == (3, 2, 1) and value(update.node).dim() > 3


def _parts(node: Any) -> list[Node]:
    node = uncast(node)
    return [p for a in node.args for p in _parts(a)] if _is_sum(node) else [node] if isinstance(node, Node) else []


def _gated_power(update: _Update) -> bool:
    """Whether each channel decays by an exponential of a sigmoid times a rate that is learned, and takes in a value of
    its own."""
    for node in _within(update.decay):
        factors = []
        if node.target is aten.exp.default:
            factors = _leaves(node.args[0])
        elif node.target is aten.pow.Tensor_Tensor:
            factors = [node.args[0], *_leaves(node.args[1])]
        if len(factors) > 1 and any(f.target is aten.sigmoid.default for f in factors if isinstance(f, Node)):
            return not any(_contracts(n) or _is_outer(n) for n in _within(update.added))
    return False


def _leaves(node: Any) -> list[Node]:
    """The tensors whose product `node` is, through views and casts."""
    *_, node = _through_views(node)
    if node.target is aten.neg.default:
        return _leaves(node.args[0])
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return [node]
    return [leaf for a in node.args if isinstance(value(a), torch.Tensor) for leaf in _leaves(a)]


def _is_outer(node: Node) -> bool:
    """Whether `node` is a product of two tensors neither of which has its shape."""
    if node.target is not aten.mul.Tensor or not of_tensors(node):
        return False
    whole = value(node).shape
    return not any(
        value(a).dim() == len(whole) and all(map(same_size, value(a).shape, whole)) for a in node.args
    )


def _algebra(node: Node) -> bool:
    return node.target in (aten.mul.Tensor, aten.mul.Scalar, *_SUMS, *_READS, *CONTRACTIONS) or is_cast(node)


def _corrects(update: _Update, of_one_token: bool = False) -> bool:
    """Whether what is added is a product with `v - (a product with the state)`, which has a dimension less where it is
    one token's."""
    for node in _within(update.added):
        if node.target is aten.sub.Tensor and isinstance(node.args[1], Node):
            predicted = list(_within(node.args[1]))
            smaller = long_dimensions(node) == long_dimensions(update.node) - 1
            if update.state in predicted and any(map(_contracts, predicted)) and (smaller or not of_one_token):
                return True
    return False


def _within(node: Node) -> Iterator[Node]:
    """`node` and the values it is computed from by products, contractions and views; other ops end the walk."""
    return within_steps(node, _STEPS, lambda n: n.all_input_nodes if _algebra(n) else [])


def _contracts(node: Node) -> bool:
    return any(n.target in (*CONTRACTIONS, *_SUMS) for n in _through_views(node))


def _through_views(node: Node) -> list[Node]:
    return chain(node, _READS, is_cast)


def _depends(node: Node, on: Node) -> bool:
    return on in ancestors([node], lambda a: not a < on)


def _rate_of_each_channel(decay: Node) -> bool:
    """Whether `decay` is one position of `exp(rate * step)`: the rate alone differs over the states, the step alone
    over positions."""
    *_, power = _through_views(decay)
    if power.target is not aten.exp.default:
        return False
    own = _dimensions_of_factors(uncast(power.args[0]))
    # each has a dimension of its own, and both have the channels
    return len(own) == 2 and all(o - other for o, other in (own, own[::-1])) and bool(own[0] & own[1])


def _dimensions_of_factors(product: Any) -> list[set[int]]:
    """The dimensions of `product` that each of two tensors has, of which it is the product; none for what is no such
    product."""
    if not isinstance(product, Node):
        return []
    if (made := contraction(product)) is not None:
        factors = [{*f.dims} - {BROADCAST} for f in made.factors]
        return factors if all(d >= 0 for f in factors for d in f) else []
    if product.target is not aten.mul.Tensor or not of_tensors(product):
        return []
    sides: list[Node] = [a for a in product.args if isinstance(a, Node)]
    shapes = [[1] * (value(product).dim() - value(a).dim()) + list(value(a).shape) for a in sides]
    return [{i for i, n in enumerate(s) if not (isinstance(n, int) and n == 1)} for s in shapes]
