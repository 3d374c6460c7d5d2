"""Losses of logits that a linear makes but for one operation that the op has no word for: near misses that say so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import SUMS_OF_TENSORS
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.fx.views import CASTS, RESHAPES, UNIT_DIMS, is_cast, is_identity
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.linear_cross_entropy.logits import LOG_SOFTMAX
from megacpp_compile.matchers.low_rank import match_adapted
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.reader.links import through

TAG = "between"
_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
_ALIKE = (*LOG_SOFTMAX, aten.neg.default, aten.sigmoid.default, aten.tanh.default, aten.transpose.int,
          aten.permute.default, aten.flatten.using_ints, aten.slice.Tensor, aten.select.int)  # fmt: skip
_CHOICES = (aten.gather.default, aten.take_along_dim.default)
_FACTORS = (aten.mul.Tensor, aten.div.Tensor)
_FILLS = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.masked_fill.Scalar,
          aten.masked_fill.Tensor, aten.slice_scatter.default, aten.select_scatter.default, aten.index_fill.int_Scalar,
          aten.index_fill.int_Tensor, aten.index_put.default, aten.index_copy.default, aten.scatter.value,
          aten.scatter.src, aten.masked_scatter.default)  # fmt: skip
_ADDED_TO = (aten.index_add.default, aten.scatter_add.default)
_BOUNDS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.nan_to_num.default)
_REMEDY = {
    "words": "choose the weight's rows and not the words of the logits",
    "fill": "cut words behind the last one off, `logits[..., :words]`, or give the linear a bias that leaves them out",
    "bound": "a softcap bounds logits, too",
    "parts": "put hidden states together, or the weight's rows, and not the logits",
    "rows": "multiply the hidden states by it, which makes the same logits",
    "factor": "of a tensor it has one element and stands in front of a softcap; multiply the weight by it, or the bias",
    "path": "of a low-rank path (LoRA) without dropout add the weights, `F.linear(x, w + s * (b @ a))`, or leave the "
    "head without an adapter",
    "sum": "a bias has an element a word, no wider dtype than the logits', and stands in front of a softcap",
}


def between(graph: fx.Graph, found: Collection[Node]) -> Iterator[MatchFailure]:
    """Every loss whose logits are a linear's, none of `found`, behind one operation that is not followed."""
    told = set[Node]()
    for target in _LOSSES + _CHOICES:
        for loss in graph.find_nodes(op="call_function", target=target):
            stop, node = None, loss.args[0]
            if target in _CHOICES and not _of_log_softmax(loss):
                continue
            while isinstance(node, Node) and node.op == "call_function" and match_linear(node) is None:
                kind = _kind(node)
                if kind is None:
                    break
                stop = (node, kind) if kind else stop
                node = _source(node)
            else:
                if isinstance(node, Node) and node.op == "call_function" and node not in found and stop is not None:
                    at, kind = stop
                    if at in told:
                        continue
                    told.add(at)
                    reason = f"{at.target.overloadpacket.__name__} stands between the linear and its loss"  # type: ignore
                    yield MatchFailure(at, TAG, f"{reason}, which the op does not compute: {_REMEDY[kind]}")


def _of_log_softmax(choice: Node) -> bool:
    """Whether `choice` takes one log-probability of each row."""
    index = choice.args[2 if choice.target is aten.gather.default else 1]
    source = through(choice.args[0], is_identity, is_cast, aten.neg.default)
    return source.target in LOG_SOFTMAX and 1 in value(index).shape[-1:]  # type: ignore[union-attr]


def _kind(node: Node) -> str | None:
    """What of `_REMEDY` there is to say of `node`, "" where it is followed; None where it is something else."""
    if node.target in _FILLS:
        return "fill"
    if node.target is aten.slice.Tensor and not _same_last(node, node.args[0]):
        return "words"
    if node.target in _ADDED_TO:
        return "sum"
    if node.target in _BOUNDS:
        return "bound"
    if node.target is aten.cat.default:
        return "parts"
    if node.target in RESHAPES and match_linear(node.args[0]) and not _same_last(node, node.args[0]):  # type: ignore[arg-type]
        return "words"
    if node.target in RESHAPES or node.target in UNIT_DIMS or is_identity(node) or is_cast(node):
        return ""
    if node.target in _ALIKE or node.target in CASTS:
        return ""
    if node.target not in (*SUMS_OF_TENSORS, *_FACTORS):
        return None
    other = next((n for n in node.args if n is not _source(node)), None)
    if number_of(other) is not None:
        return "" if node.target in _FACTORS else "sum"
    if node.target in SUMS_OF_TENSORS:
        adapted = match_adapted(node, vectors=True)
        return "path" if adapted is not None and adapted.paths else "sum"
    fake = value(other)
    return "rows" if isinstance(fake, torch.Tensor) and fake.dim() > 0 and same_size(fake.shape[-1], 1) else "factor"


def _same_last(node: Node, other: Any) -> bool:
    return same_size(value(node).shape[-1], value(other).shape[-1])


def _source(node: Node) -> Node | None:
    """The operand of `node` that has its shape, the first of them."""
    tensors = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor) and value(n).is_floating_point()]
    alike = [n for n in tensors if same_shape(n, node)]
    return next(iter([*alike, *tensors]), None)
