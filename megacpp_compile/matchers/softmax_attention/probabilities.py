"""Probabilities of an attention: a softmax in any spelling, and the product with values that reads it."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import ADDITIONS, FILLS, SOFTMAXES
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.views import COPIES, FOLDS, PERMUTATIONS, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.fx.walks import following, reached, within_steps
from megacpp_compile.matchers.latent_attention.core import WHERES, constant, is_low
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.softmax_attention.logarithms import POWERS, SUMS, less_its_logarithm
from megacpp_compile.matchers.softmax_attention.parts import Dropout, NotAttention, Scores
from megacpp_compile.matchers.softmax_attention.scores import AROUND_SUMS, ScoresReader, reduced
from megacpp_compile.matchers.ssd.atoms import Dim, flat
from megacpp_compile.matchers.ssd.packed import alike
from megacpp_compile.reader.links import chain, only_user, onward, through
from megacpp_compile.reader.products import CONTRACTED, Factor, product_of


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Probabilities over dimension `dim` of `scores`, made by `nodes`. one: with 1 more in their sum, as of a sink
    whose logit is 0. total: what the product of the exponentials with the values is divided by, where it is that which
    is normalised. but: why this is no softmax, though nearly one. factor: of the scores, where powers are of 2."""

    scores: Node
    dim: int
    nodes: frozenset[Node]
    one: bool = False
    total: Node | None = None
    but: str = ""
    factor: float = 1.0


def softmax_of(node: Node) -> Softmax | None:
    """The softmax that `node` is the result of, or the exponentials of one that is normalised behind the values."""
    if node.target in SOFTMAXES:
        return Softmax(node.args[0], node.args[1] % value(node).dim(), frozenset([node]))  # type: ignore[arg-type,operator]
    if node.target in POWERS:
        if (less := less_its_logarithm(node)) is not None:
            return Softmax(*less[:2], frozenset(less[2]), factor=less[3])
        return _normalised_after(node)
    if (parts := _quotient(node)) is None:
        return None
    weights, total = parts
    found = _total(total, weights)
    return found and dataclasses.replace(found, nodes=found.nodes | {node, *_between(node, weights, total)})


def _normalised_after(node: Node) -> Softmax | None:
    """Exponentials whose sum divides a product of them."""
    for user in node.users:
        end = user
        while len(end.users) == 1 and (end is user or end.target in AROUND_SUMS | ADDITIONS or _inverse(end)):
            end = next(iter(end.users))
        parts = _quotient(end)
        if user.target in SUMS and parts is not None and parts[0] is not node:
            if (found := _total(parts[1], node)) is not None:
                return dataclasses.replace(found, total=parts[1])
    return None


def _inverse(node: Node) -> bool:
    """Whether `node` is 1 divided by something, or a part of that."""
    times_1 = node.target is aten.mul.Tensor and constant(node.args[1]) == 1
    return times_1 or node.target is aten.reciprocal.default


def _quotient(node: Node) -> tuple[Node, Node] | None:
    """(a, b) of a / b, also as a times what 1 is divided by."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return None
    if node.target is aten.div.Tensor:
        return node.args  # type: ignore[return-value]
    if node.target is aten.mul.Tensor:
        for a, b in (node.args, node.args[::-1]):
            b = through(b, lambda n: _inverse(n) and n.target is not aten.reciprocal.default)
            if b.target is aten.reciprocal.default:  # type: ignore[union-attr]
                return a, b.args[0]  # type: ignore[union-attr,return-value]
    return None


def _between(quotient: Node, weights: Node, total: Node) -> list[Node]:
    """The nodes of a reciprocal."""
    first = next((a for a in quotient.all_input_nodes if a not in (weights, total)), total)
    below = following(first, lambda n: next(iter(n.all_input_nodes), None))
    return list(itertools.takewhile(lambda n: n is not total, below))


@or_none
def _total(total: Node, weights: Node) -> Softmax | None:
    """What `total` makes of exponentials `weights`: the softmax that they are divided by it for, less the division."""
    nodes = chain(weights, lambda n: n.target is aten.mul.Tensor and not n.kwargs and isinstance(n.args[0], Node))
    but = "exponentials are multiplied before they are summed" if len(nodes) > 1 else ""
    one, powers = False, nodes[-1]
    NoMatch.when(powers.target not in POWERS)
    inside = total
    while inside.target in ADDITIONS and not inside.kwargs and isinstance(inside.args[0], Node):
        nodes.append(inside)
        more = constant(inside.args[1])
        inside, one = inside.args[0], more == 1 and not one
        if more is None or not one:
            but = f"{'something' if more is None else f'{more:g}'} is added to the sum of exponentials"
    found = NoMatch.unless(reduced(inside, weights, SUMS, total))
    own, factor = frozenset([*nodes, *found[1]]), POWERS[powers.target]
    return Softmax(powers.args[0], found[0], own, one, None, but, factor)  # type: ignore[arg-type]


def divided(product: Node, total: Node) -> tuple[Node, list[Node]]:
    """(a product of exponentials with values divided by their sum, the nodes before)."""
    nodes = onward(product, COPIES, is_cast)
    user = only_user(nodes[-1])
    if user is None:
        raise NotAttention(nodes[-1], "weights-kept", "the product of exponentials is read before it is normalised")
    parts = _quotient(user)
    if parts != (nodes[-1], total) or not same_shape(user, nodes[-1]):
        reason = f"{user.target} reads the product of exponentials before it is normalised"
        raise NotAttention(user, "weights-changed", reason)
    return user, [*nodes, *_between(user, *parts)]


@or_none
def weighted(
    reader: ScoresReader, softmax: Node, scores: Scores, dim: int, own: Collection[Node] = ()
) -> tuple[Node, Factor, list[Dim], Factor] | None:
    """(the product with the values, the probabilities in it, their dimensions, the values in it). own: what makes the
    probabilities."""
    node, dims = softmax, [flat(d) for d in scores.dims]
    cut = scores.sinks is None or scores.sinks[0] is softmax
    while True:
        users = [u for u in node.users if u not in own]
        if (noisy := _by_noise(node, users)) is not None:
            (node, *others), drawn, p = noisy
            reader.dropout = _dropout(drawn, p, reader.dropout)
            reader.inside += [node, *others]
            continue
        if len(users) != 1:
            NoMatch.when(not meets_values(softmax))
            reason = "the probabilities are read by more than the product with the values"
            raise NotAttention(node, "weights-kept", reason)
        user = users[0]
        if user.target in COPIES or is_cast(user) or _no_dropout(user):
            node = user
        elif user.target is aten.dropout.default:
            p = number_of(user.args[1]) if user.args[2] is True else None
            node, reader.dropout = user, _dropout(user, p, reader.dropout)
        elif user.target in (*FILLS, *WHERES) and _hides_again(reader, user, node, scores, dims):
            node, reader.zeros = user, True
        elif user.target is aten.slice.Tensor and not cut and _without_sink(user, scores.sinks_first, dim):
            node, cut = user, True
        elif user.target in RESHAPES | FOLDS | PERMUTATIONS | UNIT_DIMS and cut:
            node, dims = user, [flat(d) for d in reader.view(user, dims)]
        else:
            break
        reader.inside.append(node)
    product = product_of(user)
    if product is None:
        NoMatch.when(not meets_values(softmax))
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


def _hides_again(reader: ScoresReader, node: Node, weights: Node, scores: Scores, dims: list[Dim]) -> bool:
    """Whether `node` writes 0 for the probabilities of scores that a low number alone hides already, which changes only
    rows without a key: of that number, as those of -inf have NaN for gradients."""
    args: list[Any] = [*node.args]
    kind = "seen" if node.target in WHERES else "hidden"
    of, mask, fill = args if kind == "hidden" else (args[1], args[0], args[2])
    if constant(of) is not None:
        of, fill, kind = fill, of, "hidden"
    hiding = [t for t in scores.terms if t.kind != "bias"]
    if of is not weights or constant(fill) != 0 or not same_shape(node, weights) or len(hiding) != 1:
        return False
    if dims != [flat(d) for d in scores.dims]:
        return False
    (term,) = hiding
    others = [t for t in scores.terms if t is not term]
    low = is_low(term.fill) and term.fill > float("-inf")
    return low and term.kind == kind and alike(term.node, mask) and all(_hides_nothing(reader, t.node) for t in others)


def _hides_nothing(reader: ScoresReader, bias: Node) -> bool:
    """Whether what is added to scores is made of weights, products and numbers that are not low."""

    def made_of(node: Node) -> list[Node]:
        tensors = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
        return tensors if product_of(node) is None else []

    for node in reached([bias], made_of):
        given = node.op != "call_function" and node not in reader.weights
        if given or any(is_low(a) for a in (node, *node.args) if not isinstance(a, (list, tuple))):
            return False
    return True


def _by_noise(node: Node, users: list[Node]) -> tuple[list[Node], Node, float | None] | None:
    """(nodes, the first of which has what is left, the one that draws, the probability to drop) of a dropout with two
    results, and of a product with noise, as a dropout in place is traced: `w * (bernoulli(empty_like(w), 1 - p) / (1 -
    p))`."""
    if len(users) == 1 and users[0].target is aten.native_dropout.default and users[0].args[2] is True:
        dropped = list(users[0].users)
        return ([*dropped, *users], users[0], number_of(users[0].args[1])) if _only_first(dropped) else None
    shaped, products = ([u for u in users if (u.target is aten.empty_like.default) == like] for like in (True, False))
    if len(shaped) != 1 or len(products) != 1 or products[0].target is not aten.mul.Tensor:
        return None
    noise = next((a for a in products[0].args if a is not node), None)
    if not isinstance(noise, Node) or noise.target not in (aten.div.Scalar, aten.div.Tensor) or noise.kwargs:
        return None
    drawn, kept = noise.args[0], number_of(noise.args[1])
    if not isinstance(drawn, Node) or drawn.target is not aten.bernoulli.p or drawn.args[0] is not shaped[0]:
        return None
    alone = all(len(one.users) == 1 for one in (shaped[0], drawn, noise))
    same = alone and kept == number_of(drawn.args[1]) and same_shape(noise, products[0])
    return ([*products, *shaped, drawn, noise], drawn, 1 - kept) if same and kept else None


def _only_first(results: list[Node]) -> bool:
    return len(results) == 1 and results[0].target is operator.getitem and results[0].args[1] == 0


def _dropout(node: Node, p: float | None, before: Dropout | None) -> Dropout:
    if before is not None or p is None:
        reason = "with a probability that is no number of the model" if p is None else "a second time"
        raise NotAttention(node, "dropout", f"probabilities are dropped at random {reason}")
    return Dropout(node, p)


def _no_dropout(node: Node) -> bool:
    return node.target is aten.dropout.default and (number_of(node.args[1]) == 0 or node.args[2] is False)


def _without_sink(node: Node, first: bool, dim: int) -> bool:
    """Whether a slice of the probabilities leaves out the sink's, the first or the last."""
    x, at, start, _, step = [*node.args, *(None,) * 4][:5]
    if at is None or at % value(x).dim() != dim or step not in (None, 1):  # type: ignore[operator]
        return False
    return start in ((1,) if first else (None, 0)) and same_size(value(node).shape[dim], value(x).shape[dim] - 1)


def meets_values(softmax: Node, depth: int = 6) -> bool:
    """Whether a product reads the probabilities, a few ops behind a softmax."""
    def made(node: Node) -> list[Node]:
        return [u for u in node.users if u.op == "call_function" and isinstance(value(u), torch.Tensor)]

    behind = (n for n in within_steps(softmax, depth + 1, made) if n is not softmax)
    return any(product_of(n) is not None and value(n).dim() > 2 for n in behind)
