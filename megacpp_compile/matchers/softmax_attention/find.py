"""Attention that a model spells out: products of queries and keys, what is done to scores, a softmax, and a product
with values.

Which dimension is which is told by the products: scores and values share those of batches and heads, the softmax goes
over those of the keys, and each dimension is made of `Axes`' atoms, so that views of scores between the products, such
as those of `bmm` and back, keep them. Masks are read by what they compare (`latent_attention/masks`): comparisons of
places become distances between query and key; a mask that is data stays data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import value
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.latent_attention.core import SDPA, arguments_of
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.softmax_attention.parts import (
    Attention,
    Dropout,
    NotAttention,
    Operand,
    Scores,
    Term,
    flattened,
    grouped,
)
from megacpp_compile.matchers.softmax_attention.probabilities import (
    Softmax,
    divided,
    meets_values,
    softmax_of,
    weighted,
)
from megacpp_compile.matchers.softmax_attention.scores import ScoresReader, less_maximum
from megacpp_compile.matchers.ssd.atoms import Atom, NoAxes, flat
from megacpp_compile.reader.products import CONTRACTED, Factor


def attentions(graph: fx.Graph, weights: frozenset[Node]) -> Iterator[Attention | MatchFailure]:
    """Every attention that is spelled out in `graph`, or handed to torch's op, and what nearly is one that is spelled
    out or handed a mask. weights: the model's parameters."""
    for node in graph.nodes:
        told = node.target is not SDPA or arguments_of(node)["attn_mask"] is not None
        try:
            if node.target is SDPA:
                found = _Reader(weights).call(node)
            elif node.op == "call_function" and (start := softmax_of(node)) is not None:
                found = _Reader(weights).attention(node, start)
            else:
                continue
            if found is not None:
                yield found
        except (NotAttention, NoAxes) as no:
            views = MatchFailure(node, "views", f"its dimensions can't be told apart: {no}")
            if told:
                yield no.failure if isinstance(no, NotAttention) else views


class _Reader(ScoresReader):
    """Reads one attention."""

    @or_none
    def attention(self, softmax: Node, start: Softmax) -> Attention | None:
        dim = start.dim
        scores = self.scores(start.scores, True)
        if scores is None:
            found = self.hidden_product(start.scores)
            if found is not None and meets_values(softmax):
                reason = f"{found.target} stands between the products of queries with keys and the softmax"
                raise NotAttention(found, "scores", reason)
            return None
        NoMatch.when(self.of_weights(scores, dim))
        if start.but:
            NoMatch.when(not meets_values(softmax))
            raise NotAttention(softmax, "softmax", f"the scores' exponentials are normalised, but {start.but}")
        if start.factor != 1:
            whole = scores.times(start.factor) if scores.sinks is None else None
            if whole is None:
                raise NotAttention(softmax, "sinks", "powers of 2 of scores with a column more")
            scores = whole
        if start.one:
            if scores.sinks is not None or less_maximum(start.scores):
                reason = "1 is added to a sum of exponentials that the largest was taken off of"
                raise NotAttention(softmax, "sinks", reason)
            scores = dataclasses.replace(scores, sinks=(softmax, ()))
        factors = NoMatch.unless(weighted(self, softmax, scores, dim, start.nodes))
        result, weights, dims, factor = factors
        end, divisions = (result, []) if start.total is None else divided(result, start.total)
        own_nodes = {*self.inside, *start.nodes, *divisions}
        for node in own_nodes - {softmax}:
            if outside := next((u for u in node.users if u not in own_nodes and u is not end), None):
                raise NotAttention(outside, "scores-kept", f"scores are read by more than the softmax ({node.name})")
        self.inside += [*start.nodes, *divisions]
        values, keys = self.operand(factor.node), scores.dims[dim]
        own: dict[int, Any] = {}  # the atoms of the result's dimensions
        for place, d in zip(weights.dims, dims, strict=True):
            if place >= 0:
                own[place] = d
        for place, theirs in zip(factor.dims, values.repeated, strict=True):
            meets = keys if place == CONTRACTED else own.get(place)
            if theirs and meets:
                self.axes.same(list(meets), list(theirs))
            elif theirs:
                own[place] = theirs
        result_dims = [own.get(i, ()) for i in range(value(result).dim())]
        if start.total is not None:
            self.check_rows(start.total, scores, dim, result_dims)
        return self.roles(softmax, scores, values, end, result_dims, keys)

    @or_none
    def call(self, node: Node) -> Attention | None:
        """A call of torch's op."""
        given = arguments_of(node)
        mask, scale, tensors = given["attn_mask"], given["scale"], [given[name] for name in ("query", "key", "value")]
        channels, rank = value(tensors[0]).shape[-1], value(node).dim()
        dropped = NoMatch.unless(number_of(given["dropout_p"]))
        NoMatch.when(given["is_causal"] and mask is not None or isinstance(scale, Node))
        NoMatch.when(not isinstance(channels, int) or rank < 3 or any(value(t).dim() != rank for t in tensors))
        outer, heads = tuple(range(rank - 2)), value(tensors[0]).shape[-3]
        query, key = (Factor(t, (*outer, rank - 2 + i, CONTRACTED)) for i, t in enumerate(tensors[:2]))
        keys, values = (self.heads_of(t, heads) for t in tensors[1:])
        scale = channels**-0.5 if scale is None else float(scale)
        scores = self.product_of_operands(node, (query, self.operand(query.node)), (key, keys), scale)
        for own, theirs in zip((*scores.dims[:-2], scores.dims[-1]), values.repeated[:-1], strict=True):
            if own and theirs:
                self.axes.same(list(own), list(theirs))
        if isinstance(mask, Node):
            kind = "seen" if value(mask).dtype == torch.bool else "bias"
            scores = dataclasses.replace(scores, terms=(Term(mask, kind, grouped(scores.dims)),))
        result_dims = [*scores.dims[:-1], values.repeated[-1]]
        self.inside, self.dropout = [node], Dropout(node, dropped) if dropped else None
        self.zeros = True
        return self.roles(node, scores, values, node, result_dims, scores.dims[-1])

    def of_weights(self, scores: Scores, dim: int) -> bool:
        """Whether scores come of a linear's weight, as those of a router or of a memory do; learned queries do not."""
        keys = set(flat(scores.dims[dim]))
        weights = [o for q, k, _ in scores.products for o in (q, k) if self.is_weight(o.node)]
        own = {a for o in weights for d in o.repeated for a in flat(d)}
        learned = dim == len(scores.dims) - 1 and not keys & own
        return bool(weights) and not learned

    def check_rows(self, total: Node, scores: Scores, dim: int, result: Any) -> None:
        """Raises NotAttention unless the sums of rows of scores divide the results for the same queries."""
        theirs = result[len(result) - len(scores.dims) :]
        for place, (own, one) in enumerate(zip(scores.dims, theirs, strict=True)):
            if place != dim and flat(own) != flat(one):
                raise NotAttention(total, "other-sum", "sums of exponentials divide what is of other queries")

    @or_none
    def roles(
        self, softmax: Node, scores: Scores, values: Operand, result: Node, result_dims: Any, keys: Any,
    ) -> Attention | None:
        """What each dimension is of; None where the products are none of an attention."""
        products = tuple((_resolved(q), _resolved(k), scale) for q, k, scale in scores.products)
        values, keys = _resolved(values), (*flat(keys),)
        order = [a for d in scores.dims for a in flat(d)]
        in_q, in_k, in_v = ({a for o in of for d in o.dims for a in d} for of in (
            [q for q, _, _ in products], [k for _, k, _ in products], [values]))  # fmt: skip
        if keys and not set(keys) <= in_k:  # the factors are the other way around
            products = tuple((k, q, scale) for q, k, scale in products)
            in_q, in_k = in_k, in_q
        channels = tuple(tuple(a for d in q.dims for a in d if a not in order) for q, _, _ in products)
        value_channels = tuple(a for d in values.dims for a in d if a not in order)
        NoMatch.when(set(keys) & in_q or not set(keys) <= in_k & in_v)
        # Queries that batches share, such as learned ones, lack these.
        NoMatch.when(not set(order) <= in_q | in_k & in_v)
        repeats = set(flat(self.repeats)) - in_k - in_v
        shared = [a for a in order if a not in keys and a not in repeats and a in in_k | in_v]
        alone = [a for a in order if a not in keys and a not in shared]
        terms = tuple(dataclasses.replace(t, dims=flattened(t.dims)) for t in scores.terms)
        if self.zeros:  # whatever number hides a key, it has no weight
            terms = tuple(dataclasses.replace(t, fill=float("-inf")) for t in terms)
        queries = _tokens(terms, [a for a in alone if a not in repeats])
        groups = tuple(shared[1:][-1:])
        heads = groups + tuple(a for a in alone if a not in queries)
        sinks = scores.sinks and (scores.sinks[0], flattened(scores.sinks[1]))
        gains = tuple(dataclasses.replace(g, dims=flattened(g.dims)) for g in scores.gains)
        for gain in gains:
            if any(set(d) & set(keys) for d in gain.dims):
                raise NotAttention(gain.node, "scores", "scores are multiplied by a number for each key")
        dims = tuple(map(list, flattened(scores.dims)))
        known = Scores(dims, products, scores.softcap, terms, sinks, scores.sinks_first, gains)
        batch = tuple(a for a in shared if a not in groups)
        return Attention(
            softmax, frozenset(self.inside), known, values, result, flattened(result_dims), batch, heads, groups,
            queries, keys, channels, value_channels, self.dropout, self.zeros,
        )  # fmt: skip


def _resolved(operand: Operand) -> Operand:
    return Operand(operand.node, flattened(operand.dims), flattened(operand.repeated))


def _tokens(terms: tuple[Term, ...], alone: list[Atom]) -> tuple[Atom, ...]:
    """Of the dimensions that queries alone have, that of the tokens: what a mask varies in, else the last."""
    varied = {a for t in terms for d in t.beside(t.node) for a in d}
    return tuple(([a for a in alone if a in varied] or alone)[-1:])
