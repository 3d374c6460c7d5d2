"""States of a recurrence made for all tokens at once, by an associative scan: `s_t = a_t s_{t-1} + b_t` as a tree of
slices, products and sums over halves of the tokens (`torch._higher_order_ops.associative_scan`, Blelloch's, Hillis and
Steele's).

In such a tree tokens are the first dimension, and what stands behind is one element by itself. So the tree is run on
random numbers with one element behind the tokens, at the number of tokens that it is written for. As it is sums and
products, two that agree on random operands are the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.views import PADS, RESHAPES
from megacpp_compile.fx.walks import reached
from megacpp_compile.matchers.ssd.atoms import number
from megacpp_compile.matchers.ssd.resize import agree
from megacpp_compile.matchers.ssd.tensor_algebra import tensors

TOLERANCE = 1e-10  # float64
FEWEST = 2  # tokens: of one there is no tree
MOST_NODES = 4096
_JOINS = {aten.cat.default, aten.stack.default}
_ARITHMETIC = {aten.mul.Tensor, aten.add.Tensor}
_TREE = {aten.slice.Tensor, *PADS, *_JOINS, *_ARITHMETIC, *RESHAPES}


@dataclasses.dataclass(frozen=True)
class States:
    """`node` [t, ...]: the states, made of decays `a` and inputs `b` of these dimensions; inside: the tree."""

    node: Node
    a: Node
    b: Node
    inside: frozenset[Node]


def find_states(graph: fx.Graph) -> Iterator[States]:
    """Every such tree of `graph`, in graph order."""
    for node in graph.nodes:
        if node.target in _TREE - _ARITHMETIC - PADS and any(u.target not in _TREE for u in node.users):
            if (found := _states(node)) is not None:
                yield found


@or_none
def _states(root: Node) -> States | None:
    fake = value(root)
    NoMatch.when(not _of_numbers(fake) or fake.dim() < 3 or (number(fake.shape[0]) or 0) < FEWEST)
    rest = tuple(fake.shape[1:])
    found = [*itertools.islice(reached([root], lambda n: tensors(n) if _is_of_tree(n, rest) else []), MOST_NODES + 3)]
    tree = {n for n in found if _is_of_tree(n, rest)}
    leaves = [n for n in found if n not in tree]
    NoMatch.when(len(leaves) != 2 or len(tree) > MOST_NODES or not all(same_shape(n, root) for n in leaves))
    pairs = ((a, b) for a, b in (leaves, leaves[::-1]) if _is_recurrence(root, sorted(tree), a, b, len(rest)))
    return next((States(root, a, b, frozenset(tree)) for a, b in pairs), None)


def _of_numbers(fake: Any) -> bool:
    return isinstance(fake, Tensor) and fake.is_floating_point()


def _is_of_tree(n: Node, rest: tuple[Any, ...]) -> bool:
    """Whether `n` does to dimensions in front of `rest` alone what any element of `rest` undergoes by itself."""
    if n.target not in _TREE or n.op != "call_function" or not n.all_input_nodes:
        return False
    if not all(_ends_with(value(m), rest) for m in (n, *tensors(n))):
        return False
    if n.target in RESHAPES:
        return True  # of elements in order, whose last dimensions stay
    if tensors(n) != n.all_input_nodes:
        return False  # a size
    front = value(n).dim() - len(rest)
    if n.target in _ARITHMETIC:
        return len(n.all_input_nodes) == len({*n.args}) == 2 and not n.kwargs and _same_rank(n)
    if n.target in PADS:
        pad, *how = n.args[1:]
        whole = list(pad)[: 2 * len(rest)]  # type: ignore[arg-type]
        return not any(whole) and not any(how) and not n.kwargs and all(isinstance(p, int) for p in pad)  # type: ignore[union-attr]
    dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", 0)
    return isinstance(dim, int) and 0 <= dim < front


def _same_rank(n: Node) -> bool:
    return len({value(m).dim() for m in (n, *n.all_input_nodes)}) == 1


def _ends_with(fake: Any, rest: tuple[Any, ...]) -> bool:
    if not _of_numbers(fake) or fake.dim() <= len(rest):
        return False
    front, behind = fake.shape[: fake.dim() - len(rest)], fake.shape[fake.dim() - len(rest) :]
    return all(map(same_size, behind, rest)) and all(number(size) is not None for size in front)


def _is_recurrence(root: Node, tree: list[Node], a: Node, b: Node, behind: int) -> bool:
    """Whether `root` is the recurrence of decays `a` and inputs `b`, at one element behind the tokens."""
    generator = torch.Generator().manual_seed(0)  # its own: what a model draws does not depend on compiling
    shape = (number(value(root).shape[0]) or 0, *(1,) * behind)
    values = {n: torch.rand(shape, dtype=torch.float64, generator=generator) + 0.1 for n in (a, b)}
    for n in tree:
        if n.target in RESHAPES:
            front = [number(size) or 0 for size in value(n).shape[: value(n).dim() - behind]]
            values[n] = values[n.args[0]].reshape((*front, *(1,) * behind))  # type: ignore[index]
        else:
            values[n] = n.target(*fx.map_arg(n.args, values.__getitem__), **n.kwargs)  # type: ignore[operator]
    state, states = torch.zeros(shape[1:], dtype=torch.float64), list[Tensor]()
    for decay, added in zip(values[a], values[b], strict=True):
        state = decay * state + added
        states.append(state)
    return agree(values[root], torch.stack(states), TOLERANCE)
