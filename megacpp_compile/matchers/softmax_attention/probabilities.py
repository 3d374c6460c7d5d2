"""Probabilities of an attention: a softmax in any spelling, and the product with values that reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import COPIES, FOLDS, PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.matchers.latent_attention.core import constant
from megacpp_compile.matchers.latent_attention.products import CONTRACTED, Factor, product_of
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.softmax_attention.parts import NotAttention, Scores
from megacpp_compile.matchers.softmax_attention.scores import ScoresReader
from megacpp_compile.matchers.ssd.atoms import Dim, flat

aten = torch.ops.aten
_SOFTMAXES = {aten.softmax.int, aten._softmax.default}


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Probabilities over dimension `dim` of `scores`, made by `nodes`. one: with 1 more in their sum, as of a sink
    whose logit is 0."""

    scores: Node
    dim: int
    nodes: frozenset[Node]
    one: bool = False


def softmax_of(node: Node) -> Softmax | None:
    """The softmax that `node` is the result of."""
    rank = value(node).dim() if isinstance(value(node), torch.Tensor) else 0
    if node.target in _SOFTMAXES:
        return Softmax(node.args[0], node.args[1] % rank, frozenset([node]))  # type: ignore[arg-type,operator]
    if node.target is aten.exp.default:
        inner: Any = node.args[0]
        made = inner.target is aten.log_softmax.int
        return Softmax(inner.args[0], inner.args[1] % rank, frozenset([node, inner])) if made else None
    if node.target is not aten.div.Tensor or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return None
    weights, total = node.args
    nodes, one = [node, weights, total], False
    if total.target in (aten.add.Tensor, aten.add.Scalar) and not total.kwargs:  # type: ignore[union-attr]
        one, total = constant(total.args[1]) == 1, total.args[0]  # type: ignore[union-attr]
        nodes.append(total)
        if not one or not isinstance(total, Node):
            return None
    summed = total.target is aten.sum.dim_IntList and total.args[0] is weights  # type: ignore[union-attr]
    if weights.target is not aten.exp.default or not summed:  # type: ignore[union-attr]
        return None
    dims, *keep = total.args[1:]  # type: ignore[union-attr]
    if len(dims) != 1 or not (keep and keep[0] or total.kwargs.get("keepdim")):  # type: ignore[union-attr,arg-type]
        return None
    return Softmax(weights.args[0], dims[0] % rank, frozenset(nodes), one)  # type: ignore[union-attr,index,operator,arg-type]


def weighted(
    reader: ScoresReader, softmax: Node, scores: Scores, dim: int
) -> tuple[Node, Factor, list[Dim], Factor] | None:
    """(the product with the values, the probabilities in it, their dimensions, the values in it)."""
    node, dims = softmax, [flat(d) for d in scores.dims]
    cut = scores.sinks is None or scores.sinks[0] is softmax
    while True:
        if len(node.users) != 1:
            if product_with_values(softmax) is None:
                return None
            reason = "the probabilities are read by more than the product with the values"
            raise NotAttention(node, "weights-kept", reason)
        user = next(iter(node.users))
        if user.target in COPIES or is_cast(user) or _no_dropout(user):
            node = user
        elif user.target is aten.dropout.default:
            raise NotAttention(user, "dropout", "probabilities are dropped at random")
        elif user.target is aten.slice.Tensor and not cut and _without_sink(user, scores.sinks_first, dim):
            node, cut = user, True
        elif user.target in RESHAPES | FOLDS | PERMUTATIONS | UNIT_DIMS and cut:
            node, dims = user, [flat(d) for d in reader.view(user, dims)]
        else:
            break
    product = product_of(user)
    if product is None:
        if product_with_values(softmax) is None:
            return None
        raise NotAttention(user, "weights-changed", f"{user.target} reads the probabilities before the values do")
    if not cut:
        raise NotAttention(user, "sinks", "the probabilities of the sinks are multiplied, too")
    weights, values = product.factors
    if weights.node is not node:
        weights, values = values, weights
    summed = next(d for place, d in zip(weights.dims, dims, strict=True) if place == CONTRACTED)
    if values.node is node or flat(summed) != flat(scores.dims[dim]):
        raise NotAttention(user, "other-sum", "what reads the probabilities sums over other dimensions than the keys'")
    return user, weights, dims, values


def _no_dropout(node: Node) -> bool:
    return node.target is aten.dropout.default and (number_of(node.args[1]) == 0 or node.args[2] is False)


def _without_sink(node: Node, first: bool, dim: int) -> bool:
    """Whether a slice of the probabilities leaves out the sink's, the first or the last."""
    x, at, start, _, step = [*node.args, *(None,) * 4][:5]
    if at is None or at % value(x).dim() != dim or step not in (None, 1):  # type: ignore[operator]
        return False
    return start in ((1,) if first else (None, 0)) and same_size(value(node).shape[dim], value(x).shape[dim] - 1)


def product_with_values(softmax: Node, depth: int = 6) -> Node | None:
    """A product that reads the probabilities, a few ops behind a softmax."""
    pending = [(softmax, 0)]
    while pending:
        node, far = pending.pop()
        for user in node.users:
            if user.op == "call_function" and isinstance(value(user), torch.Tensor):
                if product_of(user) is not None and value(user).dim() > 2:
                    return user
                if far < depth:
                    pending.append((user, far + 1))
    return None
