"""Scores of an attention as a model computes them: products of queries with keys, and what is done to them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import FILLS
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.views import COPIES, EXPANSIONS, FOLDS, PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.matchers.latent_attention.core import WHERES, constant
from megacpp_compile.matchers.latent_attention.masks import by_flags
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.softmax_attention.parts import Dropout, Gain, Operand, Scores, Term, beside, grouped
from megacpp_compile.matchers.ssd.atoms import Atom, Dim, NoAxes, flat, fresh, is_one
from megacpp_compile.matchers.ssd.axes import AxisEquations
from megacpp_compile.reader.dims import permuted, reduced_dims
from megacpp_compile.reader.links import chain, through
from megacpp_compile.reader.products import CONTRACTED, Factor, product_of

_MAXIMA = {aten.max.dim, aten.amax.default}
# What puts the dimension back that a sum has reduced; a maximum may be detached, too, or the first of a pair.
AROUND_SUMS = UNIT_DIMS | RESHAPES | COPIES
AROUND_MAXIMA = AROUND_SUMS | {aten.detach.default, operator.getitem}
# Of a factor of a product: what repeats it, too.
VIEWS = RESHAPES | FOLDS | PERMUTATIONS | UNIT_DIMS | EXPANSIONS | COPIES | {aten.repeat_interleave.self_int}


class ScoresReader:
    """Reads the scores of one attention. weights: the model's parameters."""

    def __init__(self, weights: frozenset[Node]) -> None:
        self.weights = weights
        self.axes = AxisEquations()
        self.repeats: Dim = []
        self.inside = list[Node]()  # from the products to the softmax
        self.dropout: Dropout | None = None
        self.zeros = False  # whether a row without a key has zeros

    def is_weight(self, node: Node) -> bool:
        """Whether a factor is the weight of a linear."""
        stem = _stem(node)
        return stem in self.weights and value(stem).dim() <= 2

    def operand(self, node: Node) -> Operand:
        """A factor of a product, before what repeats it or casts it to more bits."""
        *views, base = chain(node, VIEWS, is_cast)
        grown = [i for i, n in enumerate(views) if _repeats(n) or _has_more_bits(n)]
        if not grown:
            dims = grouped(fresh(n) for n in value(node).shape)
            return Operand(node, dims, dims)
        base = views[grown[-1]].args[0]
        own = wide = [fresh(n) for n in value(base).shape]
        for n in reversed(views[: grown[-1] + 1]):
            wide = self.view(n, wide)
        return Operand(base, grouped(own), grouped(wide))

    def heads_of(self, node: Node, heads: Any) -> Operand:
        """Keys or values [..., groups, tokens, channels], each group of which serves as many of `heads`."""
        operand = self.operand(node)
        groups = value(node).shape[-3]
        if same_size(groups, heads):
            return operand
        if not isinstance(groups, int) or not isinstance(heads, int):
            raise NoAxes("how many heads share a key is symbolic")
        wide = list(operand.repeated)
        wide[-3] = (*wide[-3], *self.repeat(heads // groups))
        return dataclasses.replace(operand, repeated=tuple(wide))

    def view(self, node: Node, dims: list[Dim]) -> list[Dim]:
        """The dimensions of a view of what has `dims`."""
        here, there = value(node).shape, value(node.args[0]).shape
        if node.target in COPIES or is_cast(node):
            return dims
        if node.target in RESHAPES | FOLDS:
            return self.axes.regroup(dims, here)
        if node.target in PERMUTATIONS:
            return permuted(node, dims)
        if node.target in UNIT_DIMS:
            left = iter([d for d, n in zip(dims, there, strict=True) if not is_one(n)])
            return [[] if is_one(n) else next(left) for n in here]
        if node.target in EXPANSIONS:
            padded: list[Dim] = [[] for _ in range(len(here) - len(there))] + dims
            return [d or self.repeat(n) for d, n in zip(padded, here, strict=True)]
        if node.target is aten.repeat_interleave.self_int:
            times, dim = node.args[1], node.args[2] % len(dims)  # type: ignore[operator]
            return [d + self.repeat(times) if i == dim else d for i, d in enumerate(dims)]
        raise NoAxes(f"{node.target} is no view")

    def repeat(self, times: Any) -> Dim:
        made = fresh(times)
        self.repeats += made
        return made

    def scores(self, node: Any, top: bool = False) -> Scores | None:
        """What `node` is where it is made of products of queries with keys; None where it is not."""
        found = self._read(node, top)
        if found is not None:
            self.inside.append(node)
        return found

    def _read(self, node: Any, top: bool) -> Scores | None:
        if not isinstance(node, Node) or node.op != "call_function" or not isinstance(value(node), torch.Tensor):
            return None
        target, args = node.target, node.args
        if target in COPIES or is_cast(node):
            return self.scores(args[0], top)
        if target in RESHAPES | FOLDS | PERMUTATIONS | UNIT_DIMS:
            inner = self.scores(args[0])
            return inner and self.viewed(node, inner)
        if (number := times(node)) is not None:
            inner = self.scores(args[0])
            return inner and inner.times(number)
        if target in (aten.mul.Tensor, aten.div.Tensor) and not node.kwargs:
            return self.gained(node, *args[:2])
        if target is aten.tanh.default:
            inner = self.scores(args[0])
            plain = inner is not None and inner.softcap is None and not inner.terms
            return dataclasses.replace(inner, softcap=1.0) if inner is not None and plain else None
        if target in FILLS and constant(args[2]) is not None:
            return self.masked(node, args[0], args[1], "hidden", args[2])
        if target in WHERES:
            condition, a, b = args
            if constant(b) is not None:
                return self.masked(node, a, condition, "seen", b)
            return self.masked(node, b, condition, "hidden", a) if constant(a) is not None else None
        if (hidden := by_flags(node)) is not None:
            kept, of, flags, number = hidden
            self.inside.append(kept)
            return self.masked(node, of, flags, "seen", number)
        if target is aten.add.Tensor and not node.kwargs:
            return self.sum(node, *args[:2])
        if target is aten.sub.Tensor and not node.kwargs and (maximum := less_maximum(node)):
            self.inside += maximum
            return self.scores(args[0], top)
        if target is aten.sub.Tensor and not node.kwargs:
            scores = self.scores(args[0])
            return scores and self.biased(node, scores, args[0], args[1], -1.0)
        if target is aten.baddbmm.default:
            return self.baddbmm(node)
        if top and target is aten.cat.default:
            return self.with_sinks(node)
        product = product_of(node)
        if product is None or all(self.is_weight(f.node) for f in product.factors):
            return None
        a, b = product.factors
        return self.product(node, a, b)

    def product(self, node: Node, a: Factor, b: Factor, scale: float = 1.0) -> Scores:
        return self.product_of_operands(node, (a, self.operand(a.node)), (b, self.operand(b.node)), scale)

    def product_of_operands(
        self, node: Node, a: tuple[Factor, Operand], b: tuple[Factor, Operand], scale: float
    ) -> Scores:
        (_, left), (_, right) = a, b
        dims: list[Dim] = [[] for _ in value(node).shape]
        summed: list[Any] = []
        for factor, operand in (a, b):
            for place, own in zip(factor.dims, operand.repeated, strict=True):
                if place == CONTRACTED:
                    summed.append(own)
                elif place >= 0 and own:
                    if dims[place]:
                        self.axes.same(dims[place], list(own))
                    else:
                        dims[place] = list(own)
        self.axes.same(list(summed[0]), list(summed[1]))
        return Scores(tuple(dims), ((left, right, scale),))

    def viewed(self, node: Node, inner: Scores) -> Scores:
        return dataclasses.replace(inner, dims=tuple(self.view(node, [flat(d) for d in inner.dims])))

    def gained(self, node: Node, a: Any, b: Any) -> Scores | None:
        """Scores times a tensor, or divided by one."""
        divides = node.target is aten.div.Tensor
        for of, by in ((a, b), (b, a))[: 1 if divides else 2]:
            if isinstance(by, Node) and isinstance(value(by), torch.Tensor) and (inner := self.scores(of)) is not None:
                plain = inner.softcap is None and not inner.terms and inner.sinks is None
                if not plain or not same_shape(node, of) or not value(by).is_floating_point():
                    return None
                gain = Gain(by, beside(by, grouped(inner.dims)), divides)
                return dataclasses.replace(inner, gains=(*inner.gains, gain))
        return None

    @or_none
    def masked(self, node: Node, of: Any, mask: Any, kind: str, fill: Any) -> Scores | None:
        inner = NoMatch.unless(self.scores(of))
        NoMatch.when(not isinstance(mask, Node) or not same_shape(node, of))
        low = NoMatch.unless(constant(fill))
        NoMatch.when(not low < 0)
        return dataclasses.replace(inner, terms=(*inner.terms, Term(mask, kind, grouped(inner.dims), fill=low)))

    def sum(self, node: Node, a: Any, b: Any) -> Scores | None:
        """Scores and what is added to them, or scores of two parts."""
        begin, one = len(self.inside), self.scores(a)
        middle, other = len(self.inside), self.scores(b)
        if one is not None and other is not None:
            if self._of_pairs(other, one):
                del self.inside[middle:]
                return self.biased(node, one, a, b)
            if self._of_pairs(one, other):
                del self.inside[begin:middle]
                return self.biased(node, other, b, a)
            plain = all(s.softcap is None and not s.terms and not s.gains for s in (one, other))
            if not plain or len(one.dims) != len(other.dims):
                return None
            dims = list[Dim]()
            for left, right in zip(one.dims, other.dims, strict=True):
                if left and right:
                    self.axes.same(list(left), list(right))
                dims.append(list(left) or list(right))
            return Scores(tuple(dims), one.products + other.products)
        for scores, of, bias in ((one, a, b), (other, b, a)):
            if scores is not None:
                return self.biased(node, scores, of, bias)
        return None

    def _of_pairs(self, made: Scores, scores: Scores) -> bool:
        """Whether what seemed to be scores is a bias of pairs of a query and a key (AlphaFold), of which one factor of
        its product has both, alone."""
        behind = len(made.dims) - len(scores.dims)
        queries, keys, *factors = (
            {place - more for place, dim in enumerate(of.dims) if not set(flat(dim)).isdisjoint(_atoms(operand))}
            for of, more in ((scores, 0), (made, behind)) for operand in of.products[0][:2]
        )  # fmt: skip
        alone = factors[0] - factors[1], factors[1] - factors[0]
        return any(own & (queries - keys) and own & (keys - queries) for own in alone)

    def biased(self, node: Node, scores: Scores, of: Any, bias: Any, times: float = 1.0) -> Scores | None:
        if not isinstance(bias, Node) or not isinstance(value(bias), torch.Tensor) or not same_shape(node, of):
            return None
        term = Term(bias, "bias", grouped(scores.dims), times)
        return dataclasses.replace(scores, terms=(*scores.terms, term)) if value(bias).is_floating_point() else None

    def baddbmm(self, node: Node) -> Scores | None:
        bias, a, b = node.args[:3]
        scale, times = (number_of(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
        if scale is None or times is None:
            return None
        factors = Factor(a, (0, 1, CONTRACTED)), Factor(b, (0, CONTRACTED, 2))  # type: ignore[arg-type]
        scores = self.product(node, *factors, scale)
        if times == 0 or constant(bias) == 0:
            return scores
        return dataclasses.replace(scores, terms=(Term(bias, "bias", grouped(scores.dims), times),))  # type: ignore[arg-type]

    def with_sinks(self, node: Node) -> Scores | None:
        """Scores with a column more, of one logit for each head."""
        parts, rank = node.args[0], value(node).dim()
        dim = (node.args[1] if len(node.args) > 1 else 0) % rank  # type: ignore[operator]
        if len(parts) != 2 or dim != rank - 1:  # type: ignore[arg-type]
            return None
        for first, (scored, more) in ((False, parts), (True, reversed(parts))):  # type: ignore[misc,arg-type]
            if same_size(value(more).shape[-1], 1) and (scores := self.scores(scored)) is not None:
                more = through(more, EXPANSIONS, is_cast)
                sinks = more, beside(more, grouped(scores.dims))
                return dataclasses.replace(scores, sinks=sinks, sinks_first=first)
        return None

    def hidden_product(self, node: Any, depth: int = 16) -> Node | None:
        """What no scores can be read through, a few ops behind a product of two computed tensors that `node` is made
        of."""
        path = list[Node]()
        while isinstance(node, Node) and node.op in ("call_function", "call_method") and depth:
            path.append(node)
            operands = [a for a in node.all_input_nodes if isinstance(value(a), torch.Tensor) and value(a).dim() > 2]
            for a in operands:
                product = product_of(a)
                if product is not None and not any(self.is_weight(f.node) for f in product.factors):
                    return next((n for n in reversed(path) if self.scores(n) is None), path[0])
            node, depth = next(iter(operands), None), depth - 1
        return None


def _atoms(operand: Operand) -> set[Atom]:
    return {a for dim in operand.repeated for a in flat(list(dim))}


def _stem(node: Node) -> Node:
    """What `node` is views and casts of."""
    return through(node, VIEWS, is_cast)


def _repeats(node: Node) -> bool:
    """Whether `node` repeats what it is a view of."""
    if node.target is aten.repeat_interleave.self_int:
        return isinstance(node.args[1], int) and len(node.args) > 2
    here, there = value(node).shape, value(node.args[0]).shape
    return node.target in EXPANSIONS and not (len(here) == len(there) and all(map(same_size, here, there)))


def _has_more_bits(node: Node) -> bool:
    """Whether `node` is a cast to a dtype that holds all of its operand's numbers."""
    return is_cast(node) and value(node).dtype.itemsize > value(node.args[0]).dtype.itemsize


def times(node: Any) -> float | None:
    """The number that `node` multiplies its first operand by."""
    products = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
    if not isinstance(node, Node) or node.target not in products or node.kwargs:
        return None
    number = number_of(node.args[1])
    number = constant(node.args[1]) if number is None else number
    if not number or len(node.args) != 2:
        return None
    return number if "mul" in str(node.target) else 1 / number


@or_none
def reduced(
    node: Node, of: Any, by: Collection[Any], shown: Node | None = None, around: Collection[Any] = AROUND_SUMS,
) -> tuple[int, list[Node]] | None:  # fmt: skip
    """(dimension, nodes) where `node` is `of` reduced over one dimension by an op in `by`, which is 1 long in `shown`
    (default: `node`), whatever of `around` leads there."""
    shape, (*nodes, node) = value(shown or node), chain(node, around)
    NoMatch.when(any(n.target is operator.getitem and n.args[1] != 0 for n in nodes))
    NoMatch.when(
        node.target not in by or node.args[0] is not of or len(node.args) < 2 or not isinstance(shape, torch.Tensor)
    )
    (dim, *others), sizes = reduced_dims(node)[0], list(value(of).shape)
    sizes[dim] = 1
    NoMatch.when(others)
    return (dim, [*nodes, node]) if len(sizes) == shape.dim() and all(map(same_size, sizes, shape.shape)) else None


def less_maximum(node: Node) -> list[Node]:
    """The nodes of the largest of scores where `node` is scores less these; none where it is not."""
    if node.target is not aten.sub.Tensor or node.kwargs or not isinstance(node.args[1], Node):
        return []
    found = reduced(node.args[1], node.args[0], _MAXIMA, around=AROUND_MAXIMA)
    return found[1] if found else []
