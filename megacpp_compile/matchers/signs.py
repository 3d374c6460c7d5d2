"""What sign the elements of a value have, as far as the ops that make it tell: whatever the data, and in any dtype."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import ADDITIONS, SCALINGS
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import CASTS, COMPOSITE_PERMUTATIONS, IDENTITIES, PADS, REARRANGEMENTS
from megacpp_compile.reader.links import through

# What has elements of its first operand alone, sums of them, or zeros beside them.
_OF_ONE = (
    REARRANGEMENTS | COMPOSITE_PERMUTATIONS
    | {operator.getitem, aten.cumsum.default, aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.flip.default}
)  # fmt: skip
_NOT_NEGATIVE = {
    aten.exp.default, aten.exp2.default, aten.softplus.default, aten.sigmoid.default, aten.relu.default,
    aten.abs.default, aten.square.default, aten.sqrt.default, aten.softmax.int, aten._softmax.default,
}  # fmt: skip


def at_most_zero(n: Any) -> bool:
    """Whether no element of `n` is over 0."""
    return -1 in _signs(n)


def _signs(n: Any, steps: int = 64) -> frozenset[int]:
    """1 where `n` is known to be at least 0, -1 where at most 0; both of what is 0."""
    if isinstance(n, (int, float)):
        return frozenset(sign for sign in (1, -1) if sign * n >= 0)
    if not isinstance(n, Node) or not steps or n.op != "call_function":
        return frozenset()
    if n.target in _NOT_NEGATIVE:
        return frozenset({1})
    if n.target is aten.log_sigmoid.default or n.target is aten.log.default and _is_sigmoid(n.args[0]):
        return frozenset({-1})
    if n.target is aten.neg.default:
        return _times(_signs(n.args[0], steps - 1), frozenset({-1}))
    if n.target in SCALINGS and len(n.args) == 2:
        return _times(*(_signs(a, steps - 1) for a in n.args))
    if n.target in ADDITIONS and len(n.args) == 2 and not n.kwargs:
        return frozenset.intersection(*(_signs(a, steps - 1) for a in n.args))
    if n.target in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
        return _clamped(n, _signs(n.args[0], steps - 1))
    if n.target in PADS:
        fill = [*n.args, *n.kwargs.values()][2:] or [0]
        return _signs(n.args[0], steps - 1) if set(fill) <= {"constant", None, 0} else frozenset()
    if n.target in (aten.cat.default, aten.stack.default):
        return frozenset.intersection(*(_signs(a, steps - 1) for a in n.args[0]))  # type: ignore[union-attr]
    return _signs(n.args[0], steps - 1) if n.target in _OF_ONE else frozenset()


def _times(a: frozenset[int], b: frozenset[int]) -> frozenset[int]:
    return frozenset(x * y for x in a for y in b)


def _clamped(n: Node, signs: frozenset[int]) -> frozenset[int]:
    least, most = [*n.args[1:], None, None][:2]
    least, most = (n.kwargs.get("min", least), n.kwargs.get("max", most))
    if n.target is aten.clamp_max.default:
        least, most = None, least
    if not all(bound is None or isinstance(bound, (int, float)) for bound in (least, most)):
        return frozenset()
    found = set()
    if 1 in signs and (most is None or most >= 0) or least is not None and least >= 0 and (most is None or most >= 0):
        found.add(1)
    if -1 in signs and (least is None or least <= 0) or most is not None and most <= 0:
        found.add(-1)
    return frozenset(found)


def _is_sigmoid(n: Any) -> bool:
    n = through(n, CASTS, IDENTITIES)
    return isinstance(n, Node) and n.target is aten.sigmoid.default and value(n).is_floating_point()
