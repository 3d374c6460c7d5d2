"""RMSNorm by meaning: a product of one tensor, the reciprocal root of that tensor's own mean square, and gains.

The matcher flattens the product, through casts, into its factors. The order of factors, the place of casts, `rsqrt` or
`1/sqrt` or a division, `pow`, `square` or `x*x`, `mean` or `sum/n` then make no difference. What computes something
else is refused, with the reason: eps in another place, another axis, the mean of another tensor.
Source: https://arxiv.org/abs/1910.07467, eq. 4.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.arithmetic import DIVISIONS, MULTIPLICATIONS, SCALINGS
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import EXPANSIONS, is_cast, uncast
from megacpp_compile.matchers._match import (
    MatchFailure,
    Refused,
    bits_of,
    or_failure,
    refuse,
    refuse_if,
    refuse_narrower,
)
from megacpp_compile.matchers.numbers import is_number, number_of
from megacpp_compile.reader.links import above, chain, through, widens

_UNIT_LENGTH = ("no-mean", "it norms to a length of 1: the root is of the sum of squares, not of their mean")


@dataclasses.dataclass
class RmsNorm:
    """`node = x * rsqrt(mean(x**2, -1) + eps) * scale * prod(gains)`; `internal` are the nodes in between."""

    node: Node
    x: Node
    eps: float | torch.SymFloat
    gains: list[Node]
    scale: float
    internal: set[Node]


def match_rms_norm(node: Node) -> RmsNorm | MatchFailure | None:
    """RMSNorm over the last dimension ending at `node`; a failure for a near miss; None for anything else."""
    found = _match(node)
    if isinstance(found, MatchFailure) and _is_l2(found, node):
        return MatchFailure(found.node, *_UNIT_LENGTH)
    return found


@or_none
def match_inverse_rms(factor: Node) -> tuple[Node, float | torch.SymFloat, set[Node]] | None:
    """(x, eps, nodes) where `factor` is `rsqrt(mean(x**2, -1) + eps)` in any spelling, x before casts; else None."""
    try:
        root = NoMatch.unless(_root(factor, False))
        mean, eps, through = root
        x, narrow, more = _mean_square(mean)
        return x if narrow is x or bits_of(narrow) >= bits_of(x) else narrow, eps, through | more
    except Refused:
        return None


def _is_l2(why: MatchFailure, top: Node) -> bool:
    """Whether `top` norms to a length of 1, and no number makes of that a mean square of 1."""
    if why.tag not in ("eps-place", "no-mean"):
        return False
    total = uncast(why.node if why.tag == "no-mean" else why.node.args[0])
    if total.target in (aten.sqrt.default, aten.rsqrt.default, aten.pow.Tensor_Scalar):
        total = _peel(total.args[0], set())
        total = _peel(total.args[0], set()) if total.target is aten.add.Tensor else total
    if not isinstance(total, Node) or total.target not in (aten.sum.dim_IntList, aten.linalg_vector_norm.default):
        return False
    over, under = list[Any](), list[Any]()
    _flatten(uncast(top), over, under, set())
    scale = math.prod(map(float, filter(_is_written, over))) / math.prod(map(float, filter(_is_written, under)))
    width = value(top).shape[-1]
    return not isinstance(width, int) or abs(scale / width**0.5 - 1) > 1e-3


def _is_written(factor: Any) -> bool:
    return isinstance(factor, (int, float)) and factor != 0


@or_failure
@or_none
def _match(node: Node) -> RmsNorm | None:
    top, (*between, node) = node, chain(node, is_cast, aten.contiguous.default, aten.clone.default)
    internal = {*between}
    inner = node.args[0] if node.target is operator.getitem else node
    refuse_if(
        isinstance(inner, Node) and inner.target in (aten.layer_norm.default, aten.native_layer_norm.default),
        node, "layer-norm", "LayerNorm subtracts the mean; only RMSNorm can be computed again this way",
    )
    if node.target is aten.rms_norm.default:
        return _whole(top, node, internal)
    NoMatch.when(node.target not in SCALINGS)
    over: list[Any] = []
    under: list[Any] = []
    seen: set[Node] = set()
    _flatten(node, over, under, seen)
    roots = [(f, _root(f, False)) for f in over] + [(f, _root(f, True)) for f in under]
    found = [(f, r) for f, r in roots if r is not None]
    NoMatch.when(not found)
    factor, (mean, eps, through) = found[0] if len(found) == 1 else _outermost(node, found)
    x, narrow, more = _mean_square(mean)
    over, under, internal = [], [], internal - seen
    _flatten(node, over, under, internal, x)  # x may be a product itself, whose factors are no factors of the norm
    internal |= through | more
    over = [f for f in over if f is not factor]
    under = [f for f in under if f is not factor]
    numbers = [*((f, 1) for f in over if is_number(f)), *((f, -1) for f in under if is_number(f))]
    normed = [f for f in over if not is_number(f) and uncast(f) is x]
    gains = [f for f in over if not is_number(f) and f not in normed]
    for f in under:
        refuse_if(not is_number(f), f, "divided", "the normed value is divided by another tensor")
    refuse_if(len(normed) != 1, mean, "other-tensor", "the mean square is of another tensor than the one it scales")
    casts = chain(normed[0], is_cast)
    if narrow in casts:  # rounded before the norm, and all of the norm is of the rounded tensor
        internal -= set(chain(narrow, is_cast))
        x = narrow
    internal.update(casts[: casts.index(x)])
    width = value(x).shape[-1]
    for gain in gains:
        _check_gain(gain, width)
    internal.discard(x)
    internal.add(top)
    refuse_narrower(internal - {top}, [x], "its operand's precision")
    scale = 1.0
    for f, power in numbers:
        scale *= number_of(f) ** power  # type: ignore[operator]
    return RmsNorm(top, x, eps, gains, scale, internal)


def _outermost(node: Node, found: list[Any]) -> Any:
    """Of several reciprocal roots in a product, the outermost: it norms what the others are factors of."""
    for factor, (mean, *rest) in found:
        x, *_ = _mean_square(mean)
        over: list[Any] = []
        under: list[Any] = []
        _flatten(node, over, under, set(), x)
        others = {f for f, _ in found if f is not factor}
        if any(uncast(f) is x for f in over) and not others & {f for f in (*over, *under) if isinstance(f, Node)}:
            return factor, (mean, *rest)
    refuse(found[1][0], "two-norms", "the product holds two reciprocal roots")


def _whole(top: Node, node: Node, internal: set[Node]) -> RmsNorm:
    x, shape, weight, eps = [*node.args, None, None][:4]
    refuse_if(  # type: ignore[arg-type]
        len(shape) != 1, node, "axes", "the norm runs over more than the last dimension"
    )
    assert isinstance(x, Node)
    if eps is None:  # torch: the epsilon of the dtype the norm is computed in
        eps = torch.finfo(torch.promote_types(value(x).dtype, torch.float32)).eps
    internal |= {node, top}
    source = uncast(x)
    internal.update(above(x, source))
    return RmsNorm(top, source, float(eps), [weight] if isinstance(weight, Node) else [], 1.0, internal)  # type: ignore[arg-type]


def _narrowest(node: Node) -> Node:
    """`node` without the casts that widen it."""
    return through(node, widens)


def _flatten(
    node: Any, over: list[Any], under: list[Any], internal: set[Node], whole: Node | None = None
) -> None:
    """Factors above and below the fraction line, through products, quotients and casts of products other than
    `whole`."""
    if isinstance(node, Node):
        inner = uncast(node)
        product = isinstance(inner, Node) and inner is not whole and inner.target in SCALINGS
        if product and not _is_square(inner) and not _is_root(inner):
            internal.update(above(node, inner), [inner])
            a, b = inner.args[:2]
            _flatten(a, over, under, internal, whole)
            if inner.target in MULTIPLICATIONS:
                _flatten(b, over, under, internal, whole)
            elif inner.kwargs:
                refuse(inner, "rounding", "the division rounds")
            else:
                _flatten(b, under, over, internal, whole)
            return
    over.append(node)


def _is_square(node: Node) -> bool:
    return node.target is aten.mul.Tensor and node.args[0] is node.args[1]


def _is_root(node: Node) -> bool:
    """`1 / sqrt(..)` spelled as a division is a root, not a product to take apart."""
    return node.target in DIVISIONS and not isinstance(node.args[0], Node)


def _peel(node: Any, internal: set[Node]) -> Any:
    """Casts, dimensions of size 1 put back after a reduction without keepdim, a statistic repeated along channels."""
    *between, node = chain(node, is_cast, aten.unsqueeze.default, _is_repeated)
    internal.update(between)
    return node


def _is_repeated(node: Node) -> bool:
    """Whether `node` has the one number of each token that its argument has, once for each channel."""
    return node.target in EXPANSIONS and same_size(value(node.args[0]).shape[-1], 1)


@or_none
def _root(factor: Any, under: bool) -> tuple[Node, Any, set[Node]] | None:
    """(mean square, eps, nodes) where `factor` is `1/sqrt(mean + eps)`, or `sqrt(mean + eps)` if `under`."""
    through: set[Node] = set()
    node = _peel(factor, through)
    NoMatch.when(not isinstance(node, Node))
    through.add(node)
    t = node.target
    if t is aten.reciprocal.default and not under:
        node, under = _peel(node.args[0], through), True
    elif t in DIVISIONS and not isinstance(node.args[0], Node) and node.args[0] == 1 and not under:
        node, under = _peel(node.args[1], through), True
    NoMatch.when(not isinstance(node, Node))
    through.add(node)
    t = node.target
    exponent = node.args[1] if t is aten.pow.Tensor_Scalar else None
    if under:
        refuse_if(
            t is aten.add.Tensor and _under_root(node.args[0]), node, "eps-place", "eps is added outside the root"
        )
        refuse_if(
            t in (aten.clamp.default, aten.clamp_min.default, aten.maximum.default) and _under_root(node.args[0]),
            node, "eps-place", "the root is clamped instead of padded with eps",
        )
        NoMatch.when(t is not aten.sqrt.default and exponent != 0.5)
    elif t is aten.add.Tensor and isinstance(node.args[0], Node) and node.args[0].target is aten.rsqrt.default:
        refuse(node, "eps-place", "eps is added outside the root")
    elif t is not aten.rsqrt.default and exponent != -0.5:
        return None
    inner = _peel(node.args[0], through)
    NoMatch.when(not isinstance(inner, Node))
    if inner.target in (aten.add.Tensor, aten.add.Scalar):
        mean, eps = inner.args[:2]
        if not isinstance(mean, Node):
            mean, eps = eps, mean
        if isinstance(eps, Node) and isinstance(value(eps), torch.SymFloat):
            eps = value(eps)  # dynamic=True makes even this number symbolic; the rewrite fixes it
        refuse_if(
            isinstance(eps, Node) or inner.kwargs.get("alpha", 1) != 1,
            inner, "eps-tensor", "eps is a tensor, not a number",
        )
        through.add(inner)
        return _peel(mean, through), eps, through
    return inner, 0.0, through


def _under_root(node: Any) -> bool:
    """Whether `node` is a root, or the norm of a vector, perhaps times a number."""
    node = through(node, is_cast, lambda n: n.target in SCALINGS and is_number(n.args[1]))
    return isinstance(node, Node) and (node.target in (aten.sqrt.default, aten.linalg_vector_norm.default) or (
        node.target is aten.pow.Tensor_Scalar and node.args[1] == 0.5))  # fmt: skip


def _mean_square(mean: Node) -> tuple[Node, Node, set[Node]]:
    """(x, x rounded, nodes) where `mean` is the mean of x's squares over its last dimension; x rounded is what x was
    cast to before it was widened again, or x."""
    internal = {mean}
    refuse_if(not isinstance(mean, Node), mean, "no-mean", "the root is not of a mean")
    divisor = None
    node = mean
    if node.target in DIVISIONS | MULTIPLICATIONS and not isinstance(node.args[1], Node):
        divisor = node.args[1] if node.target in DIVISIONS else 1 / node.args[1]  # type: ignore[operator]
        node = _peel(node.args[0], internal)
    if isinstance(node, Node) and node.target is aten.mean.dim and divisor is None:
        dims = node.args[1]
    elif isinstance(node, Node) and node.target is aten.sum.dim_IntList and divisor is not None:
        dims = node.args[1]
    else:
        refuse(mean, "no-mean", "the value under the root is not a mean of squares")
    internal.add(node)
    square = _peel(node.args[0], internal)
    fake = value(square)
    last = [d % fake.dim() for d in dims] == [fake.dim() - 1]  # type: ignore[union-attr]
    refuse_if(not last, node, "axes", f"the mean runs over dimensions {dims}, not the last one")
    if divisor is not None and abs(divisor / fake.shape[-1] - 1) > 1e-6:
        refuse(mean, "divisor", f"the sum of squares is divided by {divisor:g}, not by {fake.shape[-1]}")
    internal.add(square)
    if square.target is aten.pow.Tensor_Scalar and square.args[1] == 2 or square.target is aten.square.default:
        operand = square.args[0]
    elif square.target is aten.mul.Tensor and uncast(square.args[0]) is uncast(square.args[1]):
        operand = square.args[0]
        internal.update(chain(square.args[1], is_cast)[:-1])
    else:
        refuse(square, "no-square", "the mean is not of squares")
    assert isinstance(operand, Node)
    narrow = _narrowest(operand)
    *between, operand = chain(operand, is_cast)
    internal.update(between)
    assert isinstance(operand, Node)
    return operand, narrow, internal


def _check_gain(gain: Node, width: Any) -> None:
    refuse_if(
        not isinstance(value(gain), torch.Tensor),
        gain, "gain-shape", "a factor is a number that is known at run time only",
    )
    shape = value(gain).shape
    feature = not shape or same_size(shape[-1], 1) or same_size(shape[-1], width)
    if not feature or not all(same_size(n, 1) for n in shape[:-1]):
        refuse(gain, "gain-shape", f"a factor of shape {list(shape)} is not a gain per feature")
