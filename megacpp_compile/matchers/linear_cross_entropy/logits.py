"""The values that are made of a linear's output and keep its vocabulary whole, and who reads them.

Followed are views of rows, a range of words, casts, products with numbers and with tensors of one element, numbers that
are added, a bias of the vocabulary, a softcap (c * tanh(a * logits), or a sigmoid), and log_softmax in its spellings;
whatever else reads such a value is a reader.
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
from megacpp_compile.fx.arithmetic import ADDITIONS, MULTIPLICATIONS, SCALINGS, SOFTMAXES
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import RESHAPES, SPLITS, UNIT_DIMS, UNSQUEEZE, is_cast, is_identity
from megacpp_compile.matchers.linear import Linear
from megacpp_compile.matchers.linear_cross_entropy.by_hand import begins, log_sum_exp, without_the_largest
from megacpp_compile.matchers.linear_cross_entropy.rows import RowView, row_view
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.reader.links import only_user, onward

LOG_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)
_CHOICES = (aten.gather.default, aten.take_along_dim.default, aten.index.Tensor)
_TO_LOG = (*RESHAPES, *UNIT_DIMS, aten.add.Tensor, aten.clamp.default, aten.clamp_min.default)
_PARTED = (*SPLITS, aten.unbind.int)
_SUMS = (*ADDITIONS, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
_SQUASHES = (aten.tanh.default, aten.sigmoid.default)


@dataclasses.dataclass(frozen=True)
class Step:
    """What is done to a linear's output: times `tensor` or over it, one element, with `kind` "times" or "over"; with
    "plus", a bias `tensor` of the vocabulary, times `factor`, is added, and with "number" the number `factor`. "words"
    leaves those that the slice `view` does."""

    kind: str
    tensor: Node | None = None
    factor: float = 1.0
    view: Node | None = None


@dataclasses.dataclass(frozen=True)
class Logits:
    """`node`, made of the output y of `linear`, behind `steps`: the rows that `views` show of `factor * tanh(inner *
    y) + offset`, or of `factor * y + offset` where `inner` is None; with `normalised`, `sign` times the log-softmax of
    that, to which the offset is nothing; with `exp`, its softmax.

    shifted: whether the largest logit of each row was subtracted, by the nodes `beside`.
    dim: where the vocabulary is. path: the nodes from the linear to `node`, without the linear.
    """

    linear: Linear
    node: Node
    dim: int
    views: tuple[RowView, ...] = ()
    factor: float = 1.0
    offset: float = 0.0
    inner: float | None = None
    normalised: bool = False
    sign: float = 1.0
    exp: bool = False
    shifted: bool = False
    beside: tuple[Node, ...] = ()
    steps: tuple[Step, ...] = ()
    path: tuple[Node, ...] = ()

    @property
    def scale(self) -> float:
        """What logits are multiplied by before the softcap, in the op's terms."""
        return self.factor if self.inner is None else self.factor * self.inner

    @property
    def softcap(self) -> float | None:
        return None if self.inner is None else abs(self.factor)

    @property
    def of_some_words(self) -> bool:
        """Whether words are left out."""
        return any(step.kind == "words" for step in self.steps)

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


@or_none
def _made(logits: Logits, user: Node) -> list[Logits] | None:
    """What `user` makes of `logits`, None where it is a reader."""
    NoMatch.when(user.op != "call_function" or not user.args)
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
    if (factor := factor_of(logits.node, user)) is not None:
        if logits.normalised:
            return None if logits.exp else [logits.made(user, sign=logits.sign * factor)]
        return [logits.made(user, factor=logits.factor * factor, offset=logits.offset * factor)]
    NoMatch.when(logits.normalised)
    if _is_range_of_words(logits, user):
        return [logits.made(user, steps=(*logits.steps, Step("words", view=user)))]
    if (made := _added_number(logits, user)) is not None:
        return [made]
    if (beside := without_the_largest(user, logits.node, logits.dim)) is not None:
        return [logits.made(user, shifted=True, beside=(*logits.beside, *beside))]
    if logits.inner is None and logits.factor and (made := _after_offset(logits, user)) is not None:
        return [made]
    return _normalised(logits, user)


def _is_range_of_words(logits: Logits, user: Node) -> bool:
    """Whether `user` leaves words out at either end, as of a vocabulary that was padded."""
    if user.target is not aten.slice.Tensor or user.args[0] is not logits.node:
        return False
    dim, *ends = user.args[1:]
    return dim % value(user).dim() == logits.dim and all(isinstance(end, int) for end in ends) and ends[2:] in ([], [1])  # type: ignore[operator]


@or_none
def _added_number(logits: Logits, user: Node) -> Logits | None:
    """`logits` and a number, or a number less them."""
    NoMatch.when(
        user.kwargs or len(user.args) != 2 or user.target not in _SUMS or not isinstance(value(user), torch.Tensor)
    )
    first, other = user.args if user.target is not aten.rsub.Scalar else user.args[::-1]
    number = NoMatch.unless(number_of(other if first is logits.node else first))
    if first is logits.node:
        return logits.made(user, offset=logits.offset + (number if user.target in ADDITIONS else -number))
    sign = 1.0 if user.target in ADDITIONS else -1.0
    return logits.made(user, factor=sign * logits.factor, offset=number + sign * logits.offset)


@or_none
def _after_offset(logits: Logits, user: Node) -> Logits | None:
    """`logits` behind a softcap, or behind what a tensor does to them. A number added in front of either is a bias."""
    step, squashed = None, user.target in _SQUASHES and user.args[0] is logits.node
    NoMatch.when(not squashed and (step := _step(logits, user)) is None)
    NoMatch.when(squashed and logits.shifted)
    steps, offset = logits.steps, logits.offset
    if offset and (squashed or step.kind != "plus"):  # type: ignore[union-attr]
        number, dtype = offset / logits.factor, value(logits.linear.node).dtype
        rounded = torch.tensor(number, dtype=dtype).item()
        # it would be rounded to the linear's dtype
        NoMatch.when(value(logits.node).dtype != dtype and abs(rounded - number) > 1e-6 * abs(number))
        steps, offset = (*steps, Step("number", factor=number)), 0.0
    if not squashed:
        return logits.made(user, steps=(*steps, step), offset=offset)
    if user.target is aten.tanh.default:
        return logits.made(user, steps=steps, inner=logits.factor, factor=1.0, offset=0.0)
    return logits.made(user, steps=steps, inner=logits.factor / 2, factor=0.5, offset=0.5)  # (1 + tanh(x / 2)) / 2


def _broadcast(logits: Logits, user: Node) -> list[Logits] | None:
    """The logits among tensors that are broadcast to their shape, as `torch.distributions` do with targets."""
    places = [i for i, given in enumerate(user.args[0]) if given is logits.node]  # type: ignore[arg-type]
    items = [item for item in user.users if item.target is operator.getitem and item.args[1] in places]
    shape = value(logits.node).shape
    if any(value(i).dim() != len(shape) or not all(map(same_size, value(i).shape, shape)) for i in items):
        return None
    return [logits.made(item) for item in items]


@or_none
def _step(logits: Logits, user: Node) -> Step | None:
    """What `user` does to `logits` with a tensor of one element, or with one of an element a word."""
    NoMatch.when(user.kwargs or len(user.all_input_nodes) != 2 or user.target not in _WITH_TENSORS)
    first, other = user.args[0] is logits.node, user.args[user.args[0] is logits.node]
    fake, own, shape = value(other), value(logits.node), value(user).shape
    NoMatch.when(not isinstance(fake, torch.Tensor) or fake.is_complex())
    NoMatch.when(torch.promote_types(own.dtype, value(user).dtype) != value(user).dtype)
    NoMatch.when(len(shape) != own.dim() or not all(map(same_size, shape, own.shape)))
    if user.target in (aten.add.Tensor, aten.sub.Tensor):
        at = logits.dim - own.dim() + fake.dim()
        sizes = [n for d, n in enumerate(fake.shape) if d != at]
        NoMatch.when(
            at < 0 or not same_size(fake.shape[at], own.shape[logits.dim]) or not all(same_size(n, 1) for n in sizes)
        )
        NoMatch.when(
            torch.promote_types(fake.dtype, value(logits.linear.node).dtype) != value(logits.linear.node).dtype
        )
        sign = -1.0 if user.target is aten.sub.Tensor else 1.0
        NoMatch.when(not first and sign < 0)
        return Step("plus", other, sign / logits.factor)  # type: ignore[arg-type]
    NoMatch.when(not same_size(fake.numel(), 1) or not first and user.target is aten.div.Tensor)
    return Step("over" if user.target is aten.div.Tensor else "times", other)  # type: ignore[arg-type]


_WITH_TENSORS = (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor)


def _of_view(logits: Logits, user: Node) -> Logits | None:
    view = row_view(user, logits.dim)
    return logits.made(user, views=(*logits.views, view), dim=view.behind) if view is not None else None


def factor_of(node: Node, user: Node) -> float | None:
    """The number that `user` multiplies `node` by."""
    if user.target is aten.neg.default:
        return -1.0
    if user.kwargs or len(user.args) != 2 or user.target not in SCALINGS:
        return None
    if user.args[0] is node:
        number = number_of(user.args[1])
        return number if number is None or user.target in MULTIPLICATIONS else 1 / number if number else None
    return number_of(user.args[0]) if user.target in MULTIPLICATIONS else None


def _normalised(logits: Logits, user: Node) -> list[Logits] | None:
    """The log-softmax of `logits` that `user` is, or begins."""
    if user.target in LOG_SOFTMAX and _along(user, logits):
        return [logits.made(user, normalised=True)]
    if user.target in SOFTMAXES and _along(user, logits) and user.users:
        if all(log.target is aten.log.default for log in user.users):
            begun = logits.made(user)
            return [begun.made(log, normalised=True) for log in user.users]
        if all(reader.target in _CHOICES and _is_logged(reader) for reader in user.users):
            return [logits.made(user, normalised=True, exp=True)]
    if user.target is aten.sub.Tensor and user.args[0] is logits.node and _is_denominator(user.args[1], logits):
        return [logits.made(user, normalised=True)]
    log_sum = begins(user)
    if log_sum is not None and log_sum.of is logits.node and _subtracted(log_sum.node, logits):
        return []  # read by what is a log-softmax
    return None


def _is_logged(node: Node) -> bool:
    """Whether the logarithm of `node` is all that it is read for, perhaps kept away from zero: else it may be the score
    of an expert."""
    user = only_user(onward(node, _TO_LOG)[-1])
    return user is not None and user.target is aten.log.default


def _is_denominator(node: Any, logits: Logits) -> bool:
    """Whether `node` is the log-sum-exp of `logits`, with a dimension of size 1 for the vocabulary."""
    if isinstance(node, Node) and node.target is UNSQUEEZE and node.args[1] % value(node).dim() == logits.dim:  # type: ignore[operator]
        return is_logsumexp_of(node.args[0], logits, False)
    return is_logsumexp_of(node, logits)


def _subtracted(lse: Node, logits: Logits) -> bool:
    """Whether all that reads `lse` subtracts it from `logits`."""
    readers = [r for user in lse.users for r in (user.users if user.target is UNSQUEEZE else (user,))]
    return bool(readers) and all(
        reader.target is aten.sub.Tensor and reader.args[0] is logits.node and not reader.kwargs
        and _is_denominator(reader.args[1], logits) for reader in readers
    )  # fmt: skip


def _along(node: Node, logits: Logits) -> bool:
    return node.args[1] % value(logits.node).dim() == logits.dim  # type: ignore[operator]


def is_logsumexp_of(node: Any, logits: Logits, keepdim: bool | None = True) -> bool:
    """Whether `node` is the log-sum-exp of `logits` over the vocabulary; `keepdim` None takes either form."""
    found = log_sum_exp(node)
    if found is None or found.of is not logits.node or found.dim != logits.dim:
        return False
    return keepdim in (None, found.keepdim)
