"""Where tokens meet: the part of a graph that may be a delta rule, grown in one pass over the nodes.

It begins where gates are summed over tokens, where activations are multiplied with each other by a contraction or an
outer product; what tensor algebra makes of that is part of it, up to the first nonlinearity or layer. In front of it
every op works on each token alone: those are operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch.fx import Graph, Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_shape, value
from megacpp_compile.fx.groups import by_key
from megacpp_compile.fx.views import FOLDS, PERMUTATIONS, RESHAPES
from megacpp_compile.fx.walks import within_steps
from megacpp_compile.matchers.delta_rule.rules import POWERS, ROOTS, RULES, SCATTERS, SOLVES, WHEN
from megacpp_compile.matchers.ssd.tensor_algebra import Algebra, tensors
from megacpp_compile.matchers.ssd.tensor_ops import CONTRACTIONS, LIKE, REPEATS, VIEWS
from megacpp_compile.reader.links import through

PRODUCTS = CONTRACTIONS | {aten.baddbmm.default}
SUMS = {aten.cumsum.default}
OUTER = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor}
# A norm, or a gate, of what comes out: no part of it.
ENDS = ROOTS | POWERS | {aten.linalg_vector_norm.default, aten.reciprocal.default}
_SCALES = OUTER | {aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_NORMS = {
    aten.linalg_vector_norm.default, aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.std.correction,
    aten.var.correction,
}  # fmt: skip
_VIEWS = VIEWS | REPEATS | {aten.select.int}
_MOST_CHANGES = 4  # of a state, between two steps
LEAST_DEPTH = 3  # products in a row that a delta rule has, and attention without a softmax has not


class Cores:
    """The cores of a graph. `algebra`: of its nodes; `depth`: how many products of activations lead to a node."""

    def __init__(self, graph: Graph) -> None:
        self.algebra = Algebra(graph, RULES, when=WHEN)
        self.depth: dict[Node, int] = {}
        self._parent: dict[Node, Node] = {}
        level: dict[Node, int] = {}  # how many cores, with what is no core after each, lead to a node
        for n in graph.nodes:
            inputs = tensors(n)
            constants = self.algebra.constants
            if n.op != "call_function" or not inputs or n in constants:
                continue
            most = max(level.get(a, 0) for a in inputs)
            touched = [a for a in inputs if a in self.depth and level[a] == most]
            if self._is_core(n, inputs, touched):
                several = sum(a not in constants for a in inputs) > 1
                own = several and (n.target in PRODUCTS | SOLVES or self._is_outer(n, inputs)) or self._contracts(n)
                self.depth[n] = max((self.depth[a] for a in touched), default=0) + own
                for a in touched:
                    self._join(n, a)
                level[n] = most
            else:  # a core is never made of what is made of it
                level[n] = most + bool(touched)

    def __iter__(self) -> Iterator[list[Node]]:
        """Each core's nodes in graph order."""
        for nodes in by_key((self.root(n), n) for n in self.depth).values():
            if max(self.depth[n] for n in nodes) >= LEAST_DEPTH:
                yield nodes

    def _is_core(self, n: Node, inputs: list[Node], touched: list[Node]) -> bool:
        algebra = self.algebra
        if n not in algebra.nodes or n in algebra.constants or n.target in ENDS:
            return False
        if n.target in PRODUCTS and self._projects(n, inputs):
            return False
        if touched:
            return not (n.target is aten.mul.Tensor and n.args[0] is n.args[1])
        return n.target in SUMS or n.target in PRODUCTS or n.target in SOLVES or self._is_outer(n, inputs)

    def _projects(self, n: Node, inputs: list[Node]) -> bool:
        """Whether `n` multiplies every row with one matrix, as a layer does."""
        if any(a in self.algebra.constants for a in inputs):
            return False
        if n.target is aten.einsum.default:
            terms, _, made = str(n.args[0]).replace(" ", "").partition("->")
            return "..." not in terms and not set.intersection(set(made), *map(set, terms.split(",")))
        return any(value(a).dim() < 3 for a in inputs)

    def _is_outer(self, n: Node, inputs: list[Node]) -> bool:
        """Whether each of two operands is repeated over a dimension of the other."""
        if n.target not in OUTER or len(inputs) != 2 or any(a in self.algebra.constants for a in inputs):
            return False
        made = value(n)
        return isinstance(made, torch.Tensor) and not any(same_shape(a, n) for a in inputs)

    def _contracts(self, n: Node) -> bool:
        """Whether `n` sums up a product of activations over a dimension."""
        product = n.args[0] if n.target is aten.sum.dim_IntList else None
        if not isinstance(product, Node) or product.target is not aten.mul.Tensor or len(set(product.args)) < 2:
            return False
        return all(isinstance(a, Node) and a not in self.algebra.constants for a in product.args)

    def _join(self, a: Node, b: Node) -> None:
        self._parent[self.root(a)] = self.root(b)

    def root(self, n: Node) -> Node:
        while (above := self._parent.get(n, n)) is not n:
            self._parent[n] = self._parent.get(above, above)
            n = above
        return n


def changed_state(cores: Cores, core: Set[Node]) -> Node | None:
    """What is no part of a core and makes of a result of one, number by number, what enters another, one of both being
    `core`: a state that each step clamps, say. Of several changes the first that is no product. What a layer makes of
    another's result goes through projections."""
    entering = {a: None for n in sorted(core) for a in tensors(n) if a not in core}
    leaving = {u: None for n in sorted(core) for u in n.users if u not in cores.depth and _alike(n, u)}
    read = (_ends_in_a_core(cores, u) for u in leaving)
    made = (_changes(cores, a) for a in (*entering, *(end for end in read if end is not None)))
    changes = next((found for found in made if found), [])
    return next((n for n in changes if n.target not in _SCALES), changes[0] if changes else None)


def _changes(cores: Cores, node: Node, views: Set[object] = _VIEWS) -> list[Node]:
    """The changes of a core's result, number by number, of which `node` is the last, in graph order; none where `node`
    is made of anything else of its shape. A result may be multiplied with what is made of it, as in GELU. views: ops to
    look through that make another shape."""
    made, pending, changes = set[Node](), {node}, list[Node]()
    while pending:
        pending.remove(node := max(pending))
        if node in cores.depth:
            made.add(cores.root(node))
            continue
        constants = cores.algebra.constants
        through = node.target in views or node.target in _NORMS
        alike = {a for a in tensors(node) if a not in constants and (through or _alike(a, node))}
        if node.op != "call_function" or node.target in PRODUCTS | LIKE or not alike or len(changes) == _MOST_CHANGES:
            return []
        if not cores.algebra.passes_on(node):
            changes.append(_norm_beside(node, alike) or node)
        pending |= alike
    return changes[::-1] if len(made) == 1 else []


def _norm_beside(node: Node, alike: Set[Node]) -> Node | None:
    """The norm, or another number made of it, by which `node` multiplies a state that is among `alike`."""
    pending = [a for a in tensors(node) if node.target in _SCALES and a not in alike]
    for n in pending:
        if n.target in _NORMS:
            return n
        pending += tensors(n) if len(pending) < 2 * _MOST_CHANGES else []
    return None


def _ends_in_a_core(cores: Cores, node: Node) -> Node | None:
    """The last change of a core's result, number by number, of which `node` is the first, if a core reads it."""
    for _ in range(2 * _MOST_CHANGES):
        if any(u in cores.depth for u in node.users):
            return node
        alike = [u for u in node.users if _alike(u, node) or u.target in _VIEWS]
        if len(alike) != 1:
            return None
        (node,) = alike
    return None


def _alike(a: Node, b: Node) -> bool:
    """Whether both are tensors of one shape."""
    return all(isinstance(value(n), torch.Tensor) for n in (a, b)) and same_shape(a, b)


def in_corrected_cores(graph: Graph) -> set[Node]:
    """The nodes of all cores that show a delta rule, found to be one or not, of those that read their states, changed,
    and what enters them."""
    cores = Cores(graph)
    nodes = set[Node]()
    for core in cores:
        if corrects(core) is not None or any(_changed_in(cores, a, nodes) for n in core for a in tensors(n)):
            nodes.update(core)
    return nodes | {a for n in nodes for a in tensors(n)}


def _changed_in(cores: Cores, entering: Node, nodes: Set[Node]) -> bool:
    """Whether `entering` is a result of `nodes`, changed number by number; behind a view, it may be another layer's."""
    changes = _changes(cores, entering, frozenset()) if nodes and entering not in cores.depth else []
    return any(a in nodes for n in changes for a in tensors(n))


def corrects(nodes: list[Node]) -> Node | None:
    """The last node that shows a delta rule rather than another recurrence: rows solved for one another, or a
    difference from what a product of three predicts. None where there is none."""
    inside = set(nodes)
    for n in reversed(nodes):
        if n.target in SOLVES:
            return n
        if n.target in SCATTERS and n.args[0] in inside and _made_of(n.args[1], n.args[0], inside):  # type: ignore[arg-type]
            return n
        if n.target is aten.sub.Tensor and all(isinstance(a, Node) for a in n.args):
            subtracted = through(n.args[1], lambda n: n in inside and n.target in RESHAPES | FOLDS | PERMUTATIONS)
            if subtracted in inside and subtracted.target in PRODUCTS | {aten.sum.dim_IntList}:  # type: ignore[union-attr]
                return n
    return None


def _made_of(node: Node, source: Node, inside: Set[Node], steps: int = 8) -> bool:
    """Whether a product leads from `source` to `node` in a few steps, as in a row of forward substitution."""
    def made_of(at: tuple[Node, bool]) -> list[tuple[Node, bool]]:
        n, product = at[0], at[1] or at[0].target in PRODUCTS | {aten.mul.Tensor}
        return [(a, product) for a in n.all_input_nodes] if n in inside else []

    return (source, True) in within_steps((node, False), steps, made_of)
