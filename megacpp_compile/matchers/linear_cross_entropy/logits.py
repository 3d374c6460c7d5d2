"""The values that are made of a linear's output and keep its vocabulary whole, and who reads them.

Followed are views of rows, casts, products with numbers and with tensors of one element, a bias of the vocabulary, a
softcap (c * tanh(a * logits)), and log_softmax in its spellings; whatever else reads such a value is a reader.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import SPLITS, is_cast, is_identity
from megacpp_compile.matchers.linear import Linear
from megacpp_compile.matchers.linear_cross_entropy.rows import RowView, row_view
from megacpp_compile.matchers.numbers import number_of

aten = torch.ops.aten
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_LOG_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_PARTED = (*SPLITS, aten.unbind.int)


@dataclasses.dataclass(frozen=True)
class Step:
    """What is done to a linear's output: times `tensor` or over it, one element, with `kind` "times" or "over"; with
    "plus", a bias `tensor` of the vocabulary, times `factor`, is added."""

    kind: str
    tensor: Node
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Logits:
    """`node`, made of the output y of `linear`, behind `steps`: the rows that `views` show of `factor * tanh(inner *
    y)`, or of `factor * y` where `inner` is None; with `normalised`, `sign` times the log-softmax of that.

    dim: where the vocabulary is. path: the nodes from the linear to `node`, without the linear.
    """

    linear: Linear
    node: Node
    dim: int
    views: tuple[RowView, ...] = ()
    factor: float = 1.0
    inner: float | None = None
    normalised: bool = False
    sign: float = 1.0
    steps: tuple[Step, ...] = ()
    path: tuple[Node, ...] = ()

    @property
    def scale(self) -> float:
        """What logits are multiplied by before the softcap, in the op's terms."""
        return self.factor if self.inner is None else self.factor * self.inner

    @property
    def softcap(self) -> float | None:
        return None if self.inner is None else abs(self.factor)

    def moves(self) -> tuple[RowView, ...]:
        """The views without those that only copy."""
        return tuple(view for view in self.views if not is_identity(view.node))

    def made(self, node: Node, **changes: Any) -> Logits:
        return dataclasses.replace(self, node=node, path=(*self.path, node), **changes)


def of(linear: Linear) -> Logits:
    return Logits(linear, linear.node, value(linear.node).dim() - 1)


def readers(logits: Logits) -> Iterator[tuple[Logits, Node]]:
    """(what is read, the node that reads it) for all that reads `logits`, or what is made of them."""
    for user in logits.node.users:
        made = _made(logits, user)
        if made is None:
            yield logits, user
        for one in made or ():
            yield from readers(one)


def _made(logits: Logits, user: Node) -> list[Logits] | None:
    """What `user` makes of `logits`, None where it is a reader."""
    if user.op != "call_function" or not user.args:
        return None
    if user.target is aten.broadcast_tensors.default:
        return _broadcast(logits, user)
    if user.target in _PARTED:
        items = [_of_view(logits, item) for item in user.users if item.target is operator.getitem]
        return items if len(items) == len(user.users) and None not in items else None  # type: ignore[return-value]
    if user.args[0] is logits.node and isinstance(value(user), torch.Tensor):
        if is_cast(user):
            return [logits.made(user)]
        if (view := _of_view(logits, user)) is not None:
            return [view]
        if user.target is aten.tanh.default and logits.inner is None and not logits.normalised:
            return [logits.made(user, inner=logits.factor, factor=1.0)]
    if (factor := factor_of(logits.node, user)) is not None:
        return [logits.made(user, **({"sign": logits.sign * factor} if logits.normalised
                                     else {"factor": logits.factor * factor}))]  # fmt: skip
    if logits.normalised:
        return None
    if logits.inner is None and logits.factor and (step := _step(logits, user)) is not None:
        return [logits.made(user, steps=(*logits.steps, step))]
    return _normalised(logits, user)


def _broadcast(logits: Logits, user: Node) -> list[Logits] | None:
    """The logits among tensors that are broadcast to their shape, as `torch.distributions` do with targets."""
    places = [i for i, given in enumerate(user.args[0]) if given is logits.node]  # type: ignore[arg-type]
    items = [item for item in user.users if item.target is operator.getitem and item.args[1] in places]
    shape = value(logits.node).shape
    if any(value(i).dim() != len(shape) or not all(map(same_size, value(i).shape, shape)) for i in items):
        return None
    return [logits.made(item) for item in items]


def _step(logits: Logits, user: Node) -> Step | None:
    """What `user` does to `logits` with a tensor of one element, or with one of an element a word."""
    if user.kwargs or len(user.all_input_nodes) != 2 or user.target not in _WITH_TENSORS:
        return None
    first, other = user.args[0] is logits.node, user.args[user.args[0] is logits.node]
    fake, own, shape = value(other), value(logits.node), value(user).shape
    if not isinstance(fake, torch.Tensor) or fake.is_complex():
        return None
    if torch.promote_types(own.dtype, value(user).dtype) != value(user).dtype:
        return None
    if len(shape) != own.dim() or not all(map(same_size, shape, own.shape)):
        return None
    if user.target in (aten.add.Tensor, aten.sub.Tensor):
        at = logits.dim - own.dim() + fake.dim()
        sizes = [n for d, n in enumerate(fake.shape) if d != at]
        if at < 0 or not same_size(fake.shape[at], own.shape[logits.dim]) or any(n != 1 for n in sizes):
            return None
        if torch.promote_types(fake.dtype, value(logits.linear.node).dtype) != value(logits.linear.node).dtype:
            return None
        sign = -1.0 if user.target is aten.sub.Tensor else 1.0
        if not first and sign < 0:
            return None
        return Step("plus", other, sign / logits.factor)  # type: ignore[arg-type]
    if fake.numel() != 1 or not first and user.target is aten.div.Tensor:
        return None
    return Step("over" if user.target is aten.div.Tensor else "times", other)  # type: ignore[arg-type]


_WITH_TENSORS = (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor)


def _of_view(logits: Logits, user: Node) -> Logits | None:
    view = row_view(user, logits.dim)
    return logits.made(user, views=(*logits.views, view), dim=view.behind) if view is not None else None


def factor_of(node: Node, user: Node) -> float | None:
    """The number that `user` multiplies `node` by."""
    if user.target is aten.neg.default:
        return -1.0
    if user.kwargs or len(user.args) != 2 or user.target not in _PRODUCTS + _QUOTIENTS:
        return None
    if user.args[0] is node:
        number = number_of(user.args[1])
        return number if number is None or user.target in _PRODUCTS else 1 / number if number else None
    return number_of(user.args[0]) if user.target in _PRODUCTS else None


def _normalised(logits: Logits, user: Node) -> list[Logits] | None:
    """The log-softmax of `logits` that `user` is, or begins."""
    if user.target in _LOG_SOFTMAX and _along(user, logits):
        return [logits.made(user, normalised=True)]
    if user.target in _SOFTMAX and _along(user, logits) and user.users:
        if all(log.target is aten.log.default for log in user.users):
            begun = logits.made(user)
            return [begun.made(log, normalised=True) for log in user.users]
    if user.target is aten.sub.Tensor and user.args[0] is logits.node and is_logsumexp_of(user.args[1], logits):
        return [logits.made(user, normalised=True)]
    if is_logsumexp_of(user, logits) and user.users and all(_subtracts(reader, logits, user) for reader in user.users):
        return []  # read by what is a log-softmax
    return None


def _subtracts(reader: Node, logits: Logits, lse: Node) -> bool:
    return reader.target is aten.sub.Tensor and reader.args == (logits.node, lse) and not reader.kwargs


def _along(node: Node, logits: Logits) -> bool:
    return node.args[1] % value(logits.node).dim() == logits.dim  # type: ignore[operator]


def is_logsumexp_of(node: Any, logits: Logits, keepdim: bool | None = True) -> bool:
    """Whether `node` is the log-sum-exp of `logits` over the vocabulary; `keepdim` None takes either form."""
    if not isinstance(node, Node) or node.target is not aten.logsumexp.default or node.args[0] is not logits.node:
        return False
    dims = node.args[1]
    kept = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    n = value(logits.node).dim()
    return [d % n for d in dims] == [logits.dim] and keepdim in (None, kept)  # type: ignore[union-attr, operator]
