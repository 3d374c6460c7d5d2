"""The weights of streams, from the affine function that makes their logits: sigmoids, and a mixing matrix that is
normalised, by Sinkhorn's steps or by a softmax, or not at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import ADDITIONS, DIVISIONS, MULTIPLICATIONS, SCALINGS, SOFTMAXES, SUBTRACTIONS
from megacpp_compile.fx.edit import same_shape, value
from megacpp_compile.fx.views import is_cast
from megacpp_compile.matchers.hyper_connections.affine import VIEWS, Affine, match_affine
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.silu import match_sigmoid
from megacpp_compile.reader.dims import reduced_dims
from megacpp_compile.reader.links import through

_LOG_SOFTMAX = {aten.log_softmax.int, aten._log_softmax.default}
_RSUB = {aten.rsub.Tensor, aten.rsub.Scalar}
_POINTWISE = {aten.exp.default: "exp", aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh"}


@dataclasses.dataclass(frozen=True)
class Gate:
    """`node = sigmoid(affine) * factor + shift`."""

    node: Node
    affine: Affine
    factor: float
    shift: float


@dataclasses.dataclass(frozen=True)
class Mixing:
    """`node` is `init` of the affine function + eps[0], normalised over each of `axes` with eps[1]."""

    node: Node
    affine: Affine
    init: str
    eps: tuple[float, float]
    axes: tuple[int, ...]


def bare(node: Any) -> Any:
    """What computes `node`: it without casts, views and copies."""
    return through(node, is_cast, VIEWS)


def _cast(node: Any) -> Any:
    return through(node, is_cast)


@or_none
def match_gate(node: Node, tokens: int) -> Gate | None:
    """The gate that ends at `node` [tokens..., n]."""
    at, factor, shift = bare(node), 1.0, 0.0
    while isinstance(at, Node) and at.op == "call_function":
        found = match_sigmoid(at)
        if found is not None:
            flat = value(found[0]).dim() - 1  # tokens may be one dimension until the weights are made
            affine = match_affine(found[0], min(tokens, flat))
            return None if affine is None else Gate(node, affine, factor, shift)
        below = NoMatch.unless(_number(at))
        at, times, plus = below
        at, shift, factor = bare(at), shift + factor * plus, factor * times
    return None


def _number(node: Node) -> tuple[Any, float, float] | None:
    """(x, a, b) where `node` is a * x + b."""
    if node.target is aten.neg.default:
        return node.args[0], -1.0, 0.0
    if node.kwargs or node.target not in SCALINGS | ADDITIONS | SUBTRACTIONS | _RSUB or len(node.args) != 2:
        return None
    for x, number in (node.args, node.args[::-1]):
        c = None if isinstance(value(number), torch.Tensor) else number_of(number)
        if c is None or not isinstance(value(x), torch.Tensor):
            continue
        first = x is node.args[0]
        if node.target in MULTIPLICATIONS:
            return x, c, 0.0
        if node.target in ADDITIONS:
            return x, 1.0, c
        if node.target in SUBTRACTIONS | _RSUB:
            return (x, 1.0, -c) if first == (node.target in SUBTRACTIONS) else (x, -1.0, c)
        return (x, 1 / c, 0.0) if first and c else None
    return None


@or_none
def match_mixing(node: Node, tokens: int) -> Mixing | None:
    """The mixing matrix that ends at `node` [tokens..., n, n]."""
    at, axes, sums = _cast(node), list[int](), set[float]()
    NoMatch.when(not isinstance(at, Node) or value(at).dim() != tokens + 2)
    if at.target is aten.exp.default:
        found = _in_logarithms(node, _cast(at.args[0]), tokens)
        if found is not None:
            return found
    while (step := _normalisation(at)) is not None:
        below, axis, eps = step
        at = _cast(below)
        axes.insert(0, axis)
        sums.add(eps)
    if at.target in SOFTMAXES:  # perhaps the last of the steps in logarithms
        found = _in_logarithms(node, _cast(at.args[0]), tokens, _axis(at)) if not axes else None
        if found is not None and len(found.axes) > 1:
            return found
    NoMatch.when(len(sums) > 1)
    shift, made = 0.0, _number(at)
    if made is not None and made[1] == 1.0 and _init(bare(made[0]), tokens) is not None:
        at, shift = made[0], made[2]
    init = _init(bare(at), tokens)
    at = at if init is None else bare(at)
    affine = NoMatch.unless(match_affine(at if init is None else at.args[0], tokens))
    return Mixing(node, affine, init or "linear", (shift, sums.pop() if sums else 0.0), tuple(axes))


def _init(node: Any, tokens: int) -> str | None:
    if not isinstance(node, Node):
        return None
    if node.target in SOFTMAXES and value(node).dim() == tokens + 2:
        return {-1: "softmax", -2: "softmax_columns"}.get(_axis(node))
    return _POINTWISE.get(node.target)


def _axis(node: Node) -> int:
    """The axis of a softmax, from the last dimension."""
    axis = node.args[1]
    return axis if axis < 0 else axis - value(node).dim()  # type: ignore[operator, return-value]


@or_none
def _normalisation(node: Any) -> tuple[Node, int, float] | None:
    """(matrix, axis, eps) where `node` is the matrix over its sums along an axis, plus eps."""
    NoMatch.when(not isinstance(node, Node) or node.kwargs)
    if node.target in DIVISIONS:
        matrix, below = node.args[:2]
        found = _sums(below)
    elif node.target is aten.mul.Tensor:
        pairs = (node.args, node.args[::-1])
        inverse = ((a, b) for a, b in pairs if getattr(b, "target", None) is aten.reciprocal.default)
        matrix, below = next(inverse, (None, None))
        found = _sums(below.args[0]) if isinstance(below, Node) else None
    else:
        return None
    NoMatch.when(found is None or _cast(found[0]) is not _cast(matrix) or not same_shape(node, found[0]))
    return found


def _sums(node: Any) -> tuple[Node, int, float] | None:
    """(matrix, axis, eps) where `node` is the matrix' sums along an axis, plus eps."""
    node, eps = _cast(node), 0.0
    made = _number(node) if isinstance(node, Node) else None
    if made is not None and made[1] == 1.0:
        node, eps = _cast(made[0]), made[2]
    kept, node = _kept(node)
    if not isinstance(node, Node) or node.target is not aten.sum.dim_IntList:
        return None
    axis = _one_axis(node, kept)
    return None if axis is None else (node.args[0], axis, eps)  # type: ignore[return-value]


def _kept(node: Any) -> tuple[int | None, Any]:
    """(the dimension that an `unsqueeze` puts back behind a reduction, what is below it)."""
    if isinstance(node, Node) and node.target is aten.unsqueeze.default:
        return node.args[1] % value(node).dim(), _cast(node.args[0])  # type: ignore[operator]
    return None, node


def _one_axis(node: Node, kept: int | None) -> int | None:
    """The axis of a reduction, from the last dimension, that keeps its dimension, by itself or by `kept`."""
    dims, keepdim = reduced_dims(node)
    if len(dims) != 1 or keepdim == (kept is not None) or kept is not None and kept != dims[0]:
        return None
    axis = dims[0] - value(node.args[0]).dim()
    return axis if axis >= -2 else None


def _in_logarithms(node: Node, at: Any, tokens: int, last: int | None = None) -> Mixing | None:
    """The matrix whose logarithm is normalised: by `log_softmax`, or less its `logsumexp`. last: the axis of a softmax
    behind."""
    axes = [] if last is None else [last]
    while isinstance(at, Node):
        if at.target in _LOG_SOFTMAX:
            axes.insert(0, _axis(at))
            at = _cast(at.args[0])
            continue
        step = _less_logsumexp(at)
        if step is None:
            break
        axes.insert(0, step[1])
        at = _cast(step[0])
    affine = match_affine(at, tokens) if axes and set(axes) <= {-1, -2} else None
    return None if affine is None else Mixing(node, affine, "log", (0.0, 0.0), tuple(axes))


@or_none
def _less_logsumexp(node: Node) -> tuple[Node, int] | None:
    NoMatch.when(node.target is not aten.sub.Tensor or node.kwargs)
    matrix, sums = node.args[:2]
    kept, sums = _kept(_cast(sums))
    NoMatch.when(not isinstance(sums, Node) or sums.target is not aten.logsumexp.default)
    NoMatch.when(_cast(sums.args[0]) is not _cast(matrix))
    axis = _one_axis(sums, kept)
    return None if axis is None else (matrix, axis)  # type: ignore[return-value]
