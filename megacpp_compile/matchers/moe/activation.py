"""Matches what lies between an expert's GEMMs: an activation, its product with the other GEMM's result, bounds on any
of these, and which channels of a GEMM each is.

Bounds are clamps in all of torch's spellings, and the soft one, `cap * tanh(x / cap)`. Their ends have to be numbers in
the graph, on both sides of zero.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import of_tensors, same_size, value
from megacpp_compile.fx.filled import FULL
from megacpp_compile.lowerings._activation import Bound
from megacpp_compile.matchers.moe.gemms import strip_row_views
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.matchers.silu import match_scaled_sigmoid, match_swish, scaled
from megacpp_compile.matchers.views import RESHAPES, lane_slice
from megacpp_compile.reader.parts import Part, part_of
from megacpp_compile.reader.products import multiplied

# target -> which arguments are the lower and the upper end
_CLAMPS: dict[Any, tuple[int | None, int | None]] = {
    aten.clamp.default: (1, 2), aten.clamp.Tensor: (1, 2), aten.clip.default: (1, 2), aten.clip.Tensor: (1, 2),
    aten.clamp_min.default: (1, None), aten.clamp_min.Tensor: (1, None),
    aten.clamp_max.default: (None, 1), aten.clamp_max.Tensor: (None, 1),
}  # fmt: skip
_EXTREMES = (aten.minimum.default, aten.maximum.default)
CLAMPS = (*_CLAMPS, *_EXTREMES, aten.hardtanh.default)


@dataclasses.dataclass(frozen=True)
class Product:
    """`result(f(gate))` times `others`, to which `offset` is added; f is the function `name`, with `alpha` and, of
    silu, `linear`."""

    name: str
    alpha: float
    gate: Node
    result: Bound = Bound()
    others: tuple[Node, ...] = ()
    linear: Bound = Bound()
    offset: float = 0.0


def match_product(node: Node) -> Product | None:
    """The activation, and what it is multiplied by, that `node` computes."""
    if (summed := _plus_its_product(strip_row_views(node))) is not None:
        found = match_product(summed[0])
        return None if found is None or found.others else dataclasses.replace(found, others=summed[1:], offset=1.0)
    parts = _factors(node)
    for i, one in enumerate(parts):
        for j, other in enumerate(parts):
            if i == j:
                continue
            rest = tuple(p for k, p in enumerate(parts) if k not in (i, j))
            if (silu := _silu(one, other)) is not None:  # with a factor in between, as in `x * up * sigmoid(x)`
                return dataclasses.replace(silu, others=rest)
            if i < j and one.target is other.target is aten.relu.default and _alike(one, other):
                return Product("relu2", 1.0, one.args[0], others=rest)  # type: ignore[arg-type]
    for i, one in enumerate(parts):
        if (found := _function(one)) is not None:
            return dataclasses.replace(found, others=(*parts[:i], *parts[i + 1 :]))
    return None


def _plus_its_product(node: Node) -> tuple[Node, Node] | None:
    """(x, y) where `node` is `x + x * y`."""
    args = node.args
    if not of_tensors(node) or node.kwargs.get("value", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        return None
    if node.target is aten.addcmul.default:
        sums = [(args[0], *args[1:3]), (args[0], *args[2:0:-1])]
    elif node.target is aten.add.Tensor:
        products = [(a, strip_row_views(b)) for a, b in (args, args[::-1])]  # type: ignore[arg-type]
        sums = [(a, *factors) for a, b in products for factors in multiplied(b)]
    else:
        return None
    return next(((x, y) for x, again, y in sums if _alike(x, again)), None)  # type: ignore[arg-type]


def _factors(node: Node) -> list[Node]:
    """The factors of `node`, which is split no further where it is an activation."""
    node = strip_row_views(node)
    if node.target is not aten.mul.Tensor or not of_tensors(node) or _function(node) is not None:
        return [node]
    return [part for side in node.args for part in _factors(side)]  # type: ignore[arg-type]


def _function(node: Node) -> Product | None:
    """The function of one argument that `node` is."""
    node = strip_row_views(node)
    target, args = node.target, node.args
    if target is aten.gelu.default:
        kind = node.kwargs.get("approximate", args[1] if len(args) > 1 else "none")
        return Product("gelu" if kind == "none" else "gelu_tanh", 1.0, args[0])  # type: ignore[arg-type]
    if target is aten.relu.default:
        return Product("relu", 1.0, args[0])  # type: ignore[arg-type]
    if target is aten.pow.Tensor_Scalar and args[1] == 2 or target is aten.square.default:
        return _squared_relu(args[0], args[0])  # type: ignore[arg-type]
    if target is aten.mul.Tensor and of_tensors(node):
        if (found := _squared_relu(*args)) is not None:  # type: ignore[arg-type]
            return found
        for one, other in (args, args[::-1]):
            if (silu := _silu(one, strip_row_views(other))) is not None:  # type: ignore[arg-type]
                return silu
    if (swish := match_swish(node)) is not None:
        return Product("silu", swish[1], swish[0])
    if (bounded := bound_of(node)) is not None and (found := _function(bounded[0])) is not None:
        bound = merged(bounded[1], found.result)
        return None if bound is None else dataclasses.replace(found, result=bound)
    return None


@or_none
def _silu(one: Node, other: Node) -> Product | None:
    """The silu that `one` makes with the sigmoid `other` of it, or of what `one` is the bounded value of."""
    sigmoid = NoMatch.unless(match_scaled_sigmoid(other))
    if _alike(one, sigmoid[0]):
        return Product("silu", sigmoid[1], one)
    bounded = NoMatch.unless(bound_of(strip_row_views(one)))
    NoMatch.when(not bounded[1] or not _alike(bounded[0], sigmoid[0]))
    return Product("silu", sigmoid[1], bounded[0], linear=bounded[1])


def _squared_relu(one: Node, other: Node) -> Product | None:
    """The square of the larger of x and 0 that `one * other` is."""
    if not _alike(one, other):
        return None
    one = strip_row_views(one)
    if one.target is aten.relu.default:
        return Product("relu2", 1.0, one.args[0])  # type: ignore[arg-type]
    bounded = bound_of(one)
    if bounded is not None and (bounded[1].low, bounded[1].high) == (0, math.inf):
        return Product("relu2", 1.0, bounded[0])
    return None


def _alike(one: Node, other: Node) -> bool:
    """Whether both are the same, or the same function of the same."""
    one, other = strip_row_views(one), strip_row_views(other)
    if one is other:
        return True
    if one.target is other.target is aten.relu.default:
        return _alike(one.args[0], other.args[0])  # type: ignore[arg-type]
    if (a := lane_cut(one)) is not None and (b := lane_cut(other)) is not None:
        sizes = same_size(value(one).shape[-1], value(other).shape[-1])
        return sizes and a[1:] == b[1:] and _alike(a[0], b[0])
    first, second = bound_of(one), bound_of(other)
    return first is not None and second is not None and first[1] == second[1] and _alike(first[0], second[0])


@or_none
def bound_of(node: Node) -> tuple[Node, Bound] | None:
    """(x, the bound) where `node` is a bounded x."""
    target, args = node.target, node.args
    if target in _CLAMPS:
        names = ("min", "max")
        low, high = (
            None if at is None else args[at] if len(args) > at else node.kwargs.get(name)
            for at, name in zip(_CLAMPS[target], names, strict=True)
        )
        return _bounded(args[0], "clamp", low, high)
    if target is aten.hardtanh.default:
        ends: list[Any] = [*args[1:], *(-1.0, 1.0)[len(args) - 1 :]]
        low, high = ends
        return _bounded(args[0], "hardtanh", low, high)
    if target in _EXTREMES:
        for x, end in (args, args[::-1]):
            low, high = (None, end) if target is aten.minimum.default else (end, None)
            if _number(end) is not None and (found := _bounded(x, "minimum", low, high)) is not None:
                return found
        return None
    NoMatch.when(node.op != "call_function" or target not in (aten.mul.Tensor, aten.div.Tensor))
    curve, cap = scaled(node)
    NoMatch.when(curve.target is not aten.tanh.default or cap <= 0)
    x, inner = scaled(curve.args[0])  # type: ignore[arg-type]
    return (x, Bound(-cap, cap, "tanh")) if abs(inner * cap - 1) < 1e-12 else None


def _bounded(x: Any, kind: str, low: Any, high: Any) -> tuple[Node, Bound] | None:
    ends = -math.inf if low is None else _number(low), math.inf if high is None else _number(high)
    if ends[0] is None or ends[1] is None or not ends[0] <= 0 <= ends[1] or not isinstance(x, Node):
        return None
    return x, Bound(*ends, kind)  # type: ignore[arg-type]


def _number(given: Any) -> float | None:
    """The number that `given` is, or that all elements of the tensor are."""
    if isinstance(given, Node) and given.target in FULL:
        given = given.args[0 if given.target is aten.scalar_tensor.default else -1]
    number = number_of(given)
    return None if number is None or math.isnan(number) else number


def merged(outer: Bound, inner: Bound) -> Bound | None:
    """The one bound that both are, `inner` first; None where it takes two."""
    if not outer or not inner:
        return outer or inner
    one_each = (outer.low == -math.inf) != (inner.low == -math.inf) and (outer.high == math.inf) != (
        inner.high == math.inf
    )
    if outer.kind != inner.kind or outer.kind == "tanh" or not one_each:
        return None
    return Bound(max(outer.low, inner.low), min(outer.high, inner.high), outer.kind)


def shifted(node: Node) -> tuple[Node, float] | None:
    """(x, number) where `node` is their sum."""
    target, args = node.target, node.args
    if target not in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar) or node.kwargs:
        return None
    if len(args) != 2 or not isinstance(args[0], Node) or (by := _number(args[1])) is None:
        return None
    return args[0], by if target in (aten.add.Tensor, aten.add.Scalar) else -by


def lane_cut(node: Node) -> tuple[Node, int, int] | None:
    """(tensor, first, step) where `node` is channels of the tensor, `step` apart: a run, or every other one."""
    if (run := lane_slice(node)) is not None:
        return run[0], run[1], 1
    part = part_of(node)
    if part is None or not part.kept:
        return None if part is None else _part_of_pairs(part)
    known = all(isinstance(n, int) for n in (part.whole, part.start, part.size, part.step)) and part.size
    return (part.source, part.start, part.step) if known and part.dim == value(node).dim() - 1 else None


@or_none
def _part_of_pairs(part: Part) -> tuple[Node, int, int] | None:
    """As `lane_cut`, where the channels are split in two dimensions, and `part` is one entry of either of these."""
    split, dim, at = part.source, part.dim, part.start
    NoMatch.when(split.target not in RESHAPES or not isinstance(at, int))
    source, new = split.args[0], value(split).shape
    old = value(source).shape
    NoMatch.when(len(new) != len(old) + 1 or not all(map(same_size, new[:-2], old[:-1])))
    NoMatch.when(not isinstance(new[-1], int) or not isinstance(new[-2], int))
    if dim == len(new) - 1:
        return source, at, new[-1]
    return (source, at * new[-1], 1) if dim == len(new) - 2 else None  # type: ignore[return-value]
