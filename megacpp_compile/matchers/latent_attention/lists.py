"""Rows that each query names by a list, as what is made of it alone: a tensor that has one value at the rows named and
another at all others.

Where such a tensor comes from, a `scatter` of a constant, a comparison with every row's number or one-hot vectors, is
looked at here; what is made of it, element by element with constants, is computed for both values. A softmax over a
mask counts a row once that a list names twice: `topk`, `sort` and `argsort` name none twice, of others it is noted.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_shape, same_size, value
from megacpp_compile.matchers.latent_attention.core import constant
from megacpp_compile.matchers.latent_attention.masks import NotRows, Sum, sum_of
from megacpp_compile.reader.dims import below, reduced_dims

# What each dimension of a mask is: "b", "h", "t", "s" of the scores, "k" of a list; None for one of size 1.
Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Named:
    """`named` at the rows of a list, `other` elsewhere. index: the list, whose dimensions are `axes`; repeats: whether
    it may name a row twice."""

    index: Node
    axes: Axes
    named: float
    other: float
    repeats: bool = False


def axes_of(node: Node, whole: Axes) -> Axes:
    """The axes of what is broadcast to `whole`."""
    sizes = value(node).shape
    return tuple(None if same_size(n, 1) else a for a, n in zip(whole[len(whole) - len(sizes) :], sizes, strict=True))


def behind(node: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """What `node` is a view, copy or cast of, and its axes; None where it is none, or is only a part of it."""
    if node.target is aten.slice.Tensor and same_shape(node, node.args[0]):  # type: ignore[arg-type]
        return node.args[0], axes  # type: ignore[return-value]
    own = below(node, axes, None)
    return None if own is None else (node.args[0], tuple(own))  # type: ignore[return-value]


def named_rows(node: Any, axes: Axes) -> Named | None:
    """The list that `node` is made of, and its two values; None where it is made of something else, too. Raises NotRows
    where a list may name a row twice, and that matters to the values."""
    if not isinstance(node, Node) or node.op != "call_function" or not isinstance(value(node), torch.Tensor):
        return None
    if node.target in _SCATTERS:
        return _scattered(node, axes)
    if node.target is aten.index_put.default:
        return _put(node, axes)
    if node.target in _EQUAL and all(isinstance(a, Node) for a in node.args[:2]):
        return _compared(node, axes, node.target is aten.eq.Tensor)
    if node.target is aten.one_hot.default:
        return _list(node.args[0], axes[:-1], 1.0, 0.0) if axes[-1] == "s" and "k" in axes else None  # type: ignore[arg-type]
    if node.target in _REDUCTIONS:
        return _reduced(node, axes)
    if (step := behind(node, axes)) is not None:
        found = named_rows(*step)
        return None if found is None else _cast(found, value(node).dtype)
    return _elementwise(node, axes)


def _scattered(node: Node, axes: Axes) -> Named | None:
    base, dim, index, src = node.args[:4]
    dim, other, put = dim % len(axes), constant(base), constant(src)  # type: ignore[operator]
    if other is None or put is None or axes[dim] != "s" or node.kwargs or len(node.args) > 4:
        return None
    sizes, whole = value(index).shape, value(base).shape
    NotRows.when(
        not all(same_size(n, whole[d]) for d, n in enumerate(sizes) if d != dim),
        f"nothing says that {index}, which is scattered, has as many sequences and queries as the mask",
    )
    if "k" in axes:  # one row at each place along the list, which a reduction goes over
        return _list(index, (*axes[:dim], None, *axes[dim + 1 :]), put, other) if same_size(sizes[dim], 1) else None
    return _list(index, (*axes[:dim], "k", *axes[dim + 1 :]), put, other, scattered=True)


def _put(node: Node, axes: Axes) -> Named | None:
    """Of a constant written at the rows of a list, beside the numbers of all sequences and queries."""
    given: Any = node.args[1]
    other, put = constant(node.args[0]), constant(node.args[2])
    if other is None or put is None or len(node.args) > 3 or "s" not in axes or "k" in axes:
        return None
    if len(given) != len(axes) or not all(isinstance(index, Node) for index in given):
        return None
    dim, found = axes.index("s"), None
    own: Axes = (*axes[:dim], *axes[dim + 1 :], "k")
    for axis, size, index in zip(axes, value(node).shape, given, strict=True):
        of = axes_of(index, own)
        if axis == "s":
            found = _list(index, of, put, other) if "k" in of else None
        elif axis is not None and (not _numbers(index, of, axis) or not same_size(value(index).numel(), size)):
            return None
    return found


def _numbers(node: Node, axes: Axes, axis: str) -> bool:
    """Whether `node` is 0, 1, 2, .. along `axis`."""
    try:
        found = sum_of(node)
    except NotRows:
        return False
    steps = {a: n for a, n in zip(axes[::-1], found.steps[::-1], strict=False) if n}
    return steps == {axis: 1} and found == Sum(found.steps)


def _compared(node: Node, axes: Axes, equal: bool) -> Named | None:
    """Of a list beside the numbers of all rows."""
    for numbers, index in (node.args[:2], node.args[1::-1]):
        of = axes_of(index, axes)  # type: ignore[arg-type]
        if "k" in of and "s" not in of and _numbers(numbers, axes_of(numbers, axes), "s"):  # type: ignore[arg-type]
            return _list(index, of, float(equal), float(not equal))  # type: ignore[arg-type]
    return None


@or_none
def _reduced(node: Node, axes: Axes) -> Named | None:
    """Over the places of a list, of which one at most names a row."""
    source: Any = node.args[0]
    dims, keep = reduced_dims(node)
    NoMatch.when(len(dims) != 1 or "k" in axes or keep and axes[dims[0]] is not None)
    dim = dims[0]
    found = NoMatch.unless(named_rows(source, (*axes[:dim], "k", *axes[dim + keep :])))
    NoMatch.when(found.other != _REDUCTIONS[node.target])
    return _cast(found, value(node).dtype)


@or_none
def _elementwise(node: Node, axes: Axes) -> Named | None:
    NoMatch.when(node.target not in _ELEMENTWISE or node.kwargs or "s" not in axes)
    NoMatch.when(node.target is aten.bitwise_not.default and value(node).dtype != torch.bool)
    numbers = [constant(x) for x in node.args]
    NoMatch.when(numbers.count(None) != 1 or not isinstance(x := node.args[numbers.index(None)], Node))
    NoMatch.when(not isinstance(value(x), torch.Tensor))
    found = NoMatch.unless(named_rows(x, axes_of(x, axes)))
    given = [[own if number is None else number for number in numbers] for own in (found.named, found.other)]
    try:
        named, other = (_ELEMENTWISE[node.target](*args) for args in given)
    except (ValueError, ZeroDivisionError):
        return None
    return _cast(dataclasses.replace(found, named=float(named), other=float(other)), value(node).dtype)


def _cast(found: Named, dtype: torch.dtype) -> Named | None:
    if dtype.is_floating_point:
        return found
    kind: Any = bool if dtype == torch.bool else int
    try:
        return dataclasses.replace(found, named=float(kind(found.named)), other=float(kind(found.other)))
    except (OverflowError, ValueError):  # an infinity, or no number
        return None


def _list(index: Node, axes: Axes, named: float, other: float, scattered: bool = False) -> Named:
    """Of the list nearest to where it is chosen that has all its entries. scattered: its rows are rows of the mask, and
    have the same value however often they are named."""
    node, whole = index, (index, axes)
    place = axes
    while not _chooses(node, place):
        if node.target is aten.slice.Tensor and place[_dim(node)] == "k":
            node = node.args[0]  # type: ignore[assignment]
            continue
        step = behind(node, place)
        if step is None or value(step[0]).dtype not in (torch.int32, torch.int64):
            if scattered:
                return Named(*whole, named, other, repeats=True)
            raise NotRows(f"nothing says that {node} names no row twice: take the list from topk, sort or argsort in "
                          "the same compiled function")  # fmt: skip
        if whole[0] is node:
            whole = step
        node, place = step
    return Named(*whole, named, other)


def _chooses(node: Node, axes: Axes) -> bool:
    """Whether `node` is a list of different places along "k"."""
    if node.target is operator.getitem and node.args[1] == 1:
        chosen: Any = node.args[0]
        dims = {aten.topk.default: 2, aten.sort.default: 1, aten.sort.stable: 2}
        if chosen.target not in dims:
            return False
        at = dims[chosen.target]
        dim = chosen.args[at] if len(chosen.args) > at else chosen.kwargs.get("dim", -1)
    elif node.target is aten.argsort.default:
        dim = node.args[1] if len(node.args) > 1 else -1
    else:
        return False
    return axes[dim % len(axes)] == "k"


def _dim(node: Node) -> int:
    return (node.args[1] if len(node.args) > 1 else 0) % value(node).dim()  # type: ignore[operator]


_SCATTERS = (aten.scatter.value, aten.scatter.src)
_EQUAL = (aten.eq.Tensor, aten.ne.Tensor)
# Reduction -> the value at rows that are not named, beside which the one that is named decides.
_REDUCTIONS: Mapping[Any, float] = {
    aten.any.dim: 0.0, aten.amax.default: 0.0, aten.sum.dim_IntList: 0.0, aten.all.dim: 1.0, aten.amin.default: 1.0,
}  # fmt: skip
_ELEMENTWISE: Mapping[Any, Callable[..., Any]] = {
    **{getattr(getattr(aten, name), overload): getattr(operator, name)
       for name in ("eq", "ne", "lt", "le", "gt", "ge") for overload in ("Scalar", "Tensor")},
    aten.logical_not.default: operator.not_, aten.bitwise_not.default: operator.not_, aten.neg.default: operator.neg,
    aten.mul.Tensor: operator.mul, aten.mul.Scalar: operator.mul, aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub, aten.rsub.Scalar: lambda a, b: b - a, aten.div.Tensor: operator.truediv,
    aten.log.default: lambda a: 0.0 if a == 1 else float("-inf") if a == 0 else float("nan"),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar),
                    lambda c, a, b: a if c else b),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), lambda a, c, b: b if c else a),
}  # fmt: skip
