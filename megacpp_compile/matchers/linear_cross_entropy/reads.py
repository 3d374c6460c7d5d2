"""What losses read of logits: their cross entropy, the log-probability or the logit of a target, their log-sum-exp."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import RESHAPES, UNIT_DIMS, is_identity
from megacpp_compile.lowerings._sharded_logsumexp import sharded_logsumexp
from megacpp_compile.lowerings._sharded_loss import sharded_cross_entropy
from megacpp_compile.matchers._match import MatchFailure, or_failure, refuse, refuse_if
from megacpp_compile.matchers.linear_cross_entropy.by_hand import begins, difference, is_added_again
from megacpp_compile.matchers.linear_cross_entropy.logits import Logits
from megacpp_compile.matchers.linear_cross_entropy.one_hot import one_hot
from megacpp_compile.matchers.linear_cross_entropy.rows import RowView
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.links import onward, through

Kind = Literal["loss", "log-probability", "logit", "logsumexp", "mean", "sum"]
IGNORE_INDEX = -100  # torch's own default; what gathers has no such thing, and negative indices are errors there
_NLL = (aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
_REDUCTIONS = ("none", "mean", "sum")


@dataclasses.dataclass(frozen=True)
class Weight:
    """What rows are multiplied by: `tensor`, an element a row; `unless` takes a mask of those that count for nothing;
    shape: that of rows, where the tensor has an element for several."""

    tensor: Node
    unless: bool = False
    shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Read:
    """`node` is what `kind` says of `logits`: a row's loss, times `logits.sign`, reduced as `reduction` says; the
    target's log-probability, times that sign, or its logit; the log-sum-exp; the mean or the sum over words, of logits
    or, times the sign, of log-probabilities.

    target: int64, an element for every row, in the order of rows; None of what needs none.
    keepdim: whether the result of a read without reduction has the vocabulary's dimension, of size 1.
    exp: whether `node` is the probability and not its logarithm.
    weights: what rows are multiplied by before they are added up, in the order of rows. through: nodes between the loss
    of rows and `node`, which has the reduction; "rows" is the mean over all rows, or over those that the mask `chosen`
    leaves, "mean" that of rows not ignored.
    part: (first, words, group) where the logits are those of a rank's words, as in `sharded_cross_entropy`.
    """

    kind: Kind
    node: Node
    logits: Logits
    target: Node | None = None
    reduction: str = "none"
    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    keepdim: bool = False
    exp: bool = False
    weights: tuple[Weight, ...] = ()
    chosen: Node | None = None
    through: tuple[Node, ...] = ()
    part: tuple[Any, ...] = ()


@or_failure
def read_of(logits: Logits, node: Node) -> Read | MatchFailure | None:
    """What `node` reads of `logits`; a near miss of a loss that the op has no word for; None where it is no loss."""
    if node.target is aten.cross_entropy_loss.default and not logits.normalised:
        return _loss(logits, node, ("weight", "reduction", "ignore_index", "label_smoothing"))
    if node.target is sharded_cross_entropy and not logits.normalised:
        return _of_words(logits, node)
    if node.target is sharded_logsumexp and not logits.normalised:
        return _logsumexp_of_words(logits, node)
    if node.target in _NLL and logits.normalised and not logits.exp:
        return _loss(logits, node, ("weight", "reduction", "ignore_index"))
    refuse_if(
        node.target is aten.kl_div.default and node.args[0] is logits.node and logits.normalised and not logits.exp,
        node, *SOFT_TARGETS,
    )
    if node.target in (aten.gather.default, aten.take_along_dim.default):
        return _gathered(logits, node)
    if node.target is aten.index.Tensor:
        return _indexed(logits, node)
    if node.target is aten.mul.Tensor and not logits.exp:
        return _by_one_hot(logits, node)
    if node.target in (aten.mean.dim, aten.sum.dim_IntList):
        return _over_words(logits, node)
    return None if logits.normalised else _log_sum_exp(logits, node)


@or_none
def _over_words(logits: Logits, node: Node) -> Read | None:
    """The mean or sum over words, as label smoothing by hand has it. Of capped logits all would have to be made."""
    NoMatch.when(logits.exp or logits.inner is not None or (logits.shifted and not logits.normalised))
    NoMatch.when(not isinstance(node.args[1], list | tuple) or not set(node.kwargs) <= {"dtype"})
    dims, keepdim = reduced_dims(node)
    NoMatch.when(dims != [logits.dim])
    return Read("mean" if node.target is aten.mean.dim else "sum", node, logits, keepdim=keepdim)


@or_none
def _log_sum_exp(logits: Logits, node: Node) -> Read | None:
    """The log-sum-exp that `node` is or begins, with what was subtracted in front of it added again."""
    found = NoMatch.unless(begins(node))
    NoMatch.when(found.of is not logits.node or found.dim != logits.dim)
    if not logits.shifted:
        through = found.through if found.node is not node else ()
        return Read("logsumexp", found.node, logits, keepdim=found.keepdim, through=through)
    whole = NoMatch.unless(is_added_again(found))
    NoMatch.when(logits.node.target is not aten.sub.Tensor)
    keepdim = value(whole).dim() == value(logits.node).dim()
    return Read("logsumexp", whole, logits, keepdim=keepdim, through=(found.node, *found.through))


@or_failure
def _loss(logits: Logits, node: Node, names: tuple[str, ...]) -> Read | MatchFailure | None:
    if node.args[0] is not logits.node or logits.dim != min(1, value(logits.node).dim() - 1):
        return None
    target = node.args[1]
    given: dict[str, Any] = {**dict(zip(names, node.args[2:], strict=False)), **node.kwargs}
    refuse_if(given.get("weight") is not None, node, "class-weights", "the loss weighs classes, which the op does not")
    reduction, ignored = _REDUCTIONS[given.get("reduction", 1)], given.get("ignore_index", IGNORE_INDEX)
    if value(target).is_floating_point():
        hot = one_hot(target)
        if hot is None or hot.sign != 1 or not hot.every or logits.dim != value(logits.node).dim() - 1:
            refuse(node, *SOFT_TARGETS)
        target, ignored = hot.target, IGNORE_INDEX  # a mean is that of all rows
        reduction = "rows" if reduction == "mean" else reduction
    return Read("loss", node, logits, target, reduction, ignored, float(given.get("label_smoothing", 0.0)))


@or_none
def _of_words(logits: Logits, node: Node) -> Read | None:
    """The loss that all ranks' words make."""
    _, target, ignored, smoothing, reduction, *part = node.args
    items = list(node.users)
    NoMatch.when(len(items) != 1 or items[0].args[1] != 0 or logits.dim != min(1, value(logits.node).dim() - 1))
    NoMatch.when(logits.of_some_words)
    return Read("loss", items[0], logits, target, reduction, ignored, smoothing, through=(node,), part=tuple(part))  # type: ignore[arg-type]


def _logsumexp_of_words(logits: Logits, node: Node) -> Read | None:
    """The log-sum-exp of all ranks' words."""
    _, dim, keepdim, *part = node.args
    items = list(node.users)
    if len(items) != 1 or items[0].args[1] != 0 or logits.dim != dim or logits.of_some_words:
        return None
    return Read("logsumexp", items[0], logits, keepdim=bool(keepdim), through=(node,), part=tuple(part))


SEVERAL = "several-targets"
SOFT_TARGETS = ("soft-targets", "the targets are probabilities, as many of them as logits")


@or_failure
@or_none
def _by_one_hot(logits: Logits, node: Node) -> Read | MatchFailure | None:
    """`(one_hot(target) * logits).sum(-1)`, or the sum over all."""
    other = node.args[node.args[0] is logits.node]
    shape = value(logits.node).shape
    if not isinstance(other, Node) or logits.dim != len(shape) - 1 or other is logits.node:
        return None
    NoMatch.when(value(other).dim() != len(shape) or not all(map(same_size, value(other).shape, shape)))
    through = onward(node, aten.neg.default)
    sign = logits.sign * (-1) ** (len(through) - 1)
    reduction, keepdim = _summed(through[-1], logits.dim)
    if reduction is None:
        return None
    hot = one_hot(other)
    if hot is None:
        return MatchFailure(node, *SOFT_TARGETS) if logits.normalised else None
    refuse_if(not hot.every, node, "rows", "not known to have a one in every row: scatter takes fewer, too")
    user = next(iter(through[-1].users))
    through += hot.inside
    signed = dataclasses.replace(logits, sign=sign * hot.sign)
    if reduction == "none":
        NoMatch.when(not logits.normalised and signed.sign != 1)
        picked = _picked(signed, user, hot.target, keepdim)
        return picked and dataclasses.replace(picked, through=(*through, *picked.through))
    NoMatch.when(not logits.normalised)
    signed = dataclasses.replace(signed, sign=-signed.sign)
    return Read("loss", user, signed, hot.target, reduction, through=tuple(through))


def _summed(node: Node, dim: int) -> tuple[str | None, bool]:
    """(over what the one reader of `node` sums it, whether the dimension is kept): "none" for `dim` alone, "sum" for
    all; None where it does neither."""
    user = next(iter(node.users)) if len(node.users) == 1 else node
    if user.target is aten.sum.default and not user.kwargs:
        return "sum", False
    if user.target is not aten.sum.dim_IntList or user.kwargs or not user.args[1]:
        return None, False
    dims, kept = reduced_dims(user)
    if {*dims} == {dim}:
        return "none", kept
    return ("sum", False) if len(dims) == value(node).dim() and not kept else (None, False)


def _picked(logits: Logits, node: Node, target: Node, keepdim: bool) -> Read | None:
    if logits.shifted and not logits.normalised:
        if (found := difference(node, logits.node)) is None:
            return None
        whole, sign, through = found
        of = dataclasses.replace(logits, normalised=True, sign=sign)
        keepdim = value(whole).dim() == value(logits.node).dim()
        return Read("log-probability", whole, of, target, keepdim=keepdim, through=through)
    kind: Kind = "log-probability" if logits.normalised else "logit"
    return Read(kind, node, logits, target, keepdim=keepdim, exp=logits.exp)


@or_failure
@or_none
def _gathered(logits: Logits, node: Node) -> Read | MatchFailure | None:
    """`gather(logits, dim, index)` with one index a row."""
    NoMatch.when(node.args[0] is not logits.node or len(node.args) < 2)
    dim, index = (node.args[1:3] if node.target is aten.gather.default else (*node.args[2:3], node.args[1]))
    sizes, shape = value(logits.node).shape, value(index).shape
    NoMatch.when(not isinstance(dim, int) or dim % len(sizes) != logits.dim)
    rows = [same_size(a, b) for d, (a, b) in enumerate(zip(sizes, shape, strict=True)) if d != logits.dim]
    one = same_size(shape[logits.dim], 1)
    if all(rows) and one:
        return _picked(logits, node, index, True)  # type: ignore[arg-type]
    refuse_if(not one, node, SEVERAL, "more than one word's log-probability is read of a row")
    NoMatch.when(node.target is not aten.gather.default)
    # Of each dimension gather reads as many rows as there are indices, from the first on, be they all or fewer.
    first = RowView(node, logits.dim, logits.dim)
    return _picked(dataclasses.replace(logits, views=(*logits.views, first)), node, index, True)  # type: ignore[arg-type]


@or_none
def _indexed(logits: Logits, node: Node) -> Read | None:
    """`logits[torch.arange(n), target]` of logits [n, v], or with one such index for each dimension of rows."""
    rank = value(logits.node).dim()
    indices = list(node.args[1])  # type: ignore[arg-type]
    NoMatch.when(node.args[0] is not logits.node or logits.dim != rank - 1 or len(indices) != rank or None in indices)
    *rows, target = indices
    sizes, shape = value(logits.node).shape[:-1], value(target).shape
    NoMatch.when(value(target).dtype not in _INDICES or len(shape) != rank - 1 or not all(map(same_size, sizes, shape)))
    NoMatch.when(not all(_counts_up(index, d, sizes) for d, index in enumerate(rows)))
    return _picked(logits, node, target, False)


_INDICES = (torch.int64, torch.int32)


def _counts_up(index: Node, d: int, sizes: Sequence[Any]) -> bool:
    """Whether `index` is 0, 1, 2, ... along dimension `d` of rows with `sizes`, and the same along all others."""
    shape = value(index).shape
    at = d - len(sizes) + len(shape)
    if at < 0 or not same_size(shape[at], sizes[d]) or any(n != 1 for e, n in enumerate(shape) if e != at):
        return False
    index = through(index, UNIT_DIMS, RESHAPES)
    if index.target is aten.arange.start:
        return index.args[0] == 0
    return index.target is aten.arange.default


def same_elements(node: Node) -> Node:
    """The node that holds the elements of `node` in the same order: what a target is, however it is shaped."""
    return through(node, RESHAPES, UNIT_DIMS, is_identity, _before_broadcast)


@or_none
def _before_broadcast(node: Node) -> Node | None:
    """What `node` is the one entry of along the dimension that `broadcast_tensors` repeated."""
    NoMatch.when(node.target is not aten.slice.Tensor or list(node.args[2:]) != [0, 1])
    item = node.args[0]
    NoMatch.when(
        item.target is not operator.getitem or item.args[0].target is not aten.broadcast_tensors.default  # type: ignore
    )
    source = item.args[0].args[0][item.args[1]]  # type: ignore
    here, there = value(node).shape, value(source).shape
    return source if len(here) == len(there) and all(map(same_size, here, there)) else None
