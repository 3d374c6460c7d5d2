"""Log-sum-exps spelled out, and the largest logit that is subtracted from a row's logits in front of them.

    z = logits - logits.max(-1, keepdim=True).values
    loss = z.exp().sum(-1).log() - z.gather(-1, labels[..., None]).squeeze(-1)

A softmax is the same whatever is subtracted from a row. The log-sum-exp of `z` is another than that of the logits, and
counts in a difference to logits of `z`, or with the largest logit added again.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_shape, same_sizes, value
from megacpp_compile.fx.views import DETACH, UNIT_DIMS, is_identity
from megacpp_compile.fx.walks import descendants
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.links import above, chain, only_user, onward, through


@dataclasses.dataclass(frozen=True)
class LogSumExp:
    """`node` is the log-sum-exp of `of` along `dim`; through: the nodes between the two, which nothing else reads."""

    node: Node
    of: Node
    dim: int
    keepdim: bool
    through: tuple[Node, ...] = ()


@or_none
def log_sum_exp(node: Any) -> LogSumExp | None:
    """The log-sum-exp, over one dimension, that `node` is."""
    NoMatch.when(not isinstance(node, Node))
    total, through = node, tuple[Node, ...]()
    if node.target is aten.log.default:
        total = node.args[0]  # type: ignore[assignment]
        through = (total, total.args[0]) if total.target is aten.sum.dim_IntList and not total.kwargs else ()  # type: ignore[assignment]
        NoMatch.when(not through or through[1].target is not aten.exp.default or any(len(n.users) > 1 for n in through))
    elif node.target is not aten.logsumexp.default:
        return None
    of: Node = (through[1] if through else node).args[0]  # type: ignore[assignment]
    dims, kept = reduced_dims(total)
    return LogSumExp(node, of, dims[0], kept, through) if len(dims) == 1 else None


def begins(node: Node) -> LogSumExp | None:
    """The log-sum-exp that `node`, which reads logits, is or begins."""
    while node.target in (aten.exp.default, aten.sum.dim_IntList) and len(node.users) == 1:
        node = next(iter(node.users))
    return log_sum_exp(node)


@or_none
def without_the_largest(node: Node, of: Node, dim: int) -> tuple[Node, ...] | None:
    """The nodes that find what `node` subtracts from `of`, if it is the largest entry along `dim`, which serves for
    nothing but to be subtracted and to be added to a log-sum-exp of the difference."""
    NoMatch.when(node.target is not aten.sub.Tensor or node.args[0] is not of or node.kwargs)
    subtracted = node.args[1]
    NoMatch.when(not isinstance(subtracted, Node) or not isinstance(value(subtracted), torch.Tensor))
    kept = [1 if d == dim else n for d, n in enumerate(value(of).shape)]
    NoMatch.when(not same_sizes(value(subtracted).shape, kept))
    first, _ = _constant(subtracted)
    largest = first.args[0] if first.target is operator.getitem and first.args[1] == 0 else first
    NoMatch.when(
        largest.args[:1] != (of,) or largest.target not in (aten.amax.default, aten.max.dim)  # type: ignore[union-attr]
    )
    NoMatch.when(len(largest.args) < 2 or reduced_dims(largest)[0] != [dim])
    found = tuple(descendants([largest], _is_same_entry))  # type: ignore[list-item]
    others = {user for one in found for user in one.users if not _is_same_entry(user)} - {node}
    return found if all(_adds_again(user, node) for user in others) else None


def _is_same_entry(user: Node) -> bool:
    return user.target is operator.getitem and user.args[1] == 0 or _is_view(user) or user.target is DETACH


def is_added_again(log_sum: LogSumExp) -> Node | None:
    """The sum of `log_sum` and of the largest entry that was subtracted in front of it, if all read that."""
    users = list(_readers(log_sum.node))
    if len(users) != 1 or not _adds_again(users[0], log_sum.of):
        return None
    return users[0]


@or_none
def difference(picked: Node, of: Node) -> tuple[Node, float, tuple[Node, ...]] | None:
    """(node, sign, the nodes it is computed from): `node` is `sign` times `picked` less the log-sum-exp of `of`, and
    nothing else reads either."""
    through = onward(picked, aten.neg.default, _is_view)
    node, user = through[-1], only_user(through[-1])
    if user is None or user.target not in (aten.sub.Tensor, aten.add.Tensor) or user.kwargs:
        return None
    NoMatch.when(len(user.all_input_nodes) != 2)
    sign = (-1.0) ** sum(n.target is aten.neg.default for n in through[1:])
    other: Node = user.args[user.args[0] is node]  # type: ignore[assignment]
    log_sum = NoMatch.unless(log_sum_exp(_source(other)) if isinstance(other, Node) else None)
    NoMatch.when(log_sum.of is not of or list(_readers(log_sum.node)) != [user])
    NoMatch.when(not _alike(user, node, other))
    NoMatch.when((user.target is aten.add.Tensor) != (sign < 0))  # both have one sign
    sign = 1.0 if sign > 0 and user.args[0] is node else -1.0
    return user, sign, (*through, *above(other, log_sum.node), log_sum.node, *log_sum.through)


def _is_view(node: Node) -> bool:
    return node.target in UNIT_DIMS or is_identity(node)


def _source(node: Node) -> Node:
    return through(node, _is_view)


def _constant(node: Node) -> tuple[Node, bool]:
    """(what `node` is a view of, whether its gradient is cut off on the way)."""
    *views, node = chain(node, _is_view, DETACH)
    return node, any(view.target is DETACH for view in views)


def _readers(node: Node) -> Iterator[Node]:
    """What reads `node`, through views."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _adds_again(user: Node, difference: Node) -> bool:
    """Whether `user` is the log-sum-exp of `difference`, with what was subtracted there added again."""
    if user.target is not aten.add.Tensor or user.kwargs or difference.target is not aten.sub.Tensor:
        return False
    a, b = user.args
    if not isinstance(a, Node) or not isinstance(b, Node) or not _alike(user, a, b):
        return False
    subtracted = _constant(difference.args[1])  # type: ignore[arg-type]
    both = ((log_sum_exp(_source(one)), other) for one, other in ((a, b), (b, a)))
    return any(found and found.of is difference and _constant(other) == subtracted for found, other in both)


def _alike(first: Node, *others: Node) -> bool:
    """Whether all have one shape: nothing is repeated."""
    return all(same_shape(first, n) for n in others)
