"""Scores of an indexer: products of queries and keys, what is positive of them, and a weighted sum over heads."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_shape, value
from megacpp_compile.fx.views import COPIES, FOLDS, PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast, uncast
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_if
from megacpp_compile.matchers.softmax_attention.parts import Groups, Operand, beside, flattened, grouped
from megacpp_compile.matchers.softmax_attention.scores import ScoresReader, times
from megacpp_compile.matchers.ssd.atoms import Atom, Dim, flat, length, number
from megacpp_compile.matchers.ssd.trials import tried
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.products import product_of

# What a kernel adds up one after another; released models have 32 or 64.
MOST_HEADS = 256
_AT_LEAST = {aten.clamp.default, aten.clamp_min.default}
_VIEWS = RESHAPES | FOLDS | PERMUTATIONS | UNIT_DIMS


@dataclasses.dataclass(frozen=True)
class IndexScores:
    """`result`, whose dimensions are `dims`: the sum over `heads` of weights * relu(scale * q k).

    inside: all nodes from the product to the result. batch, queries, heads, keys, channels: the atoms of each.
    """

    relu: Node
    product: Node
    inside: frozenset[Node]
    q: Operand
    k: Operand
    weights: tuple[Node, Groups]
    scale: float
    result: Node
    dims: Groups
    batch: tuple[Atom, ...]
    queries: tuple[Atom, ...]
    heads: tuple[Atom, ...]
    keys: tuple[Atom, ...]
    channels: tuple[Atom, ...]


class Summed(NamedTuple):
    """`node`, with dimensions `dims`: the sum over heads, by `weights`, and `factor` times that."""

    node: Node
    dims: list[Dim]
    weights: tuple[Node, Groups]
    factor: float


def is_relu(node: Node) -> bool:
    """Whether `node` is its first operand where that is positive, else 0."""
    if node.target is aten.relu.default:
        return True
    least, most = [*node.args[1:], None, None][:2]
    least, most = node.kwargs.get("min", least), node.kwargs.get("max", most)
    return node.target in _AT_LEAST and most is None and not isinstance(least, Node) and least == 0


def index_scores_of(relu: Node, weights: frozenset[Node]) -> IndexScores | MatchFailure | None:
    """The scores of an indexer that `relu` is a step of, what nearly is, or None. weights: the model's parameters."""
    return tried(partial(_Reader(weights).read, relu), lambda why: None)


class _Reader(ScoresReader):
    @or_failure
    @or_none
    def read(self, relu: Node) -> IndexScores | MatchFailure | None:
        scores = NoMatch.unless(self.scores(relu.args[0]))
        NoMatch.when(len(scores.products) != 1 or scores.terms or scores.gains or scores.softcap is not None)
        summed = NoMatch.unless(self.summed(relu, [flat(d) for d in scores.dims]))
        result, of, factor = summed.node, summed.weights, summed.factor
        (q, k, scale), dims = scores.products[0], flattened(summed.dims)
        q, k = (Operand(o.node, flattened(o.dims), flattened(o.repeated)) for o in (q, k))
        in_q, in_k, in_w, out = ({a for d in g for a in d} for g in (q.dims, k.dims, flattened(of[1]), dims))
        heads = [a for d in scores.dims for a in flat(d) if a not in out]
        if not set(heads) <= in_q:
            q, k, in_q, in_k = k, q, in_k, in_q
        count = NoMatch.unless(number(length(heads)))
        NoMatch.when(not 1 < count <= MOST_HEADS or not set(heads) <= in_q & in_w)
        NoMatch.when(factor <= 0 or set(flat(self.repeats)) & out)
        keys = tuple(a for d in dims for a in d if a not in in_q)
        refuse_if(set(heads) & in_k, relu, "keys", "each head of the indexer has keys of its own")
        refuse_if(in_w & set(keys), relu, "weights", "heads are weighted by the key as well as by the query")
        batch = tuple(a for d in dims for a in d if a in in_q & in_k)
        queries = tuple(a for d in dims for a in d if a in in_q and a not in in_k)
        channels = tuple(a for d in q.dims for a in d if a not in {*batch, *queries, *heads})
        NoMatch.when(not keys or not set(channels) <= in_k or not in_w <= {*batch, *queries, *heads})
        inside = frozenset({*self.inside, relu, result})
        for read, user in ((n, u) for n in inside - {result} for u in n.users if u not in inside):
            refuse(user, "escapes", f"scores of each head are read by more than their sum ({read})")
        weights, product = (of[0], flattened(of[1])), next(n for n in inside - {result} if product_of(n) is not None)
        return IndexScores(
            relu, product, inside, q, k, weights, scale * factor, result, dims, batch, queries, tuple(heads), keys,
            channels,
        )  # fmt: skip

    def summed(
        self, node: Node, dims: list[Dim], weights: tuple[Node, Groups] | None = None, factor: float = 1.0
    ) -> Summed | None:
        """The weighted sum over heads that reads `node`, whose dimensions are `dims`."""
        for user in node.users:
            read, by, number = dims, weights, times(user) if user.args[0] is node else None
            if user.target in _VIEWS:
                read = [flat(d) for d in self.view(user, dims)]
            elif weights is not None and user.target is aten.sum.dim_IntList:
                return Summed(user, _without(user, dims), weights, factor)
            elif weights is None and number is None and user.target is aten.mul.Tensor and same_shape(user, node):
                by = self.beside(user, node, dims)
            elif weights is None and product_of(user) is not None:
                return self.weighted(user, node, dims, factor)
            elif number is None and not (user.target in COPIES or is_cast(user)):
                continue
            self.inside.append(user)
            if (by or not weights) and (found := self.summed(user, read, by, factor * (number or 1.0))) is not None:
                return found
            self.inside.pop()
        return None

    def beside(self, product: Node, node: Node, dims: list[Dim]) -> tuple[Node, Groups] | None:
        """What `product` multiplies `node` by, and its dimensions."""
        other = next((a for a in product.args if a is not node), None)
        if not isinstance(other, Node) or not value(other).is_floating_point():
            return None
        return uncast(other), beside(other, grouped(dims))

    @or_none
    def weighted(self, product: Node, node: Node, dims: list[Dim], factor: float) -> Summed | None:
        """The sum that a product of `node` with weights is."""
        found = product_of(product)
        assert found is not None
        own, other = found.factors if found.factors[0].node is node else found.factors[::-1]
        NoMatch.when(own.node is not node or other.node is node)
        weights = self.operand(other.node)
        placed = {place: list(d) for place, d in zip(own.dims, dims, strict=True)}
        for place, theirs in zip(other.dims, weights.repeated, strict=True):
            meets = placed.get(place)
            NoMatch.when(theirs and not meets)
            if theirs:
                self.axes.same(meets, list(theirs))  # type: ignore[arg-type]
        out = [placed.get(i, []) for i in range(value(product).dim())]
        return Summed(product, out, (uncast(weights.node), weights.dims), factor)


def _without(node: Node, dims: list[Dim]) -> list[Dim]:
    """The dimensions of a sum."""
    gone, keep = reduced_dims(node)
    return [[] if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]
