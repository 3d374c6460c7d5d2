"""A softmax that takes the logarithm of its sum off: `exp(x - log(sum(exp(x))))`, in base e or 2."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.views import DETACH
from megacpp_compile.matchers.softmax_attention.scores import AROUND_MAXIMA, AROUND_SUMS, less_maximum, reduced, times
from megacpp_compile.reader.links import chain

SUMS, _LOG_SUMS = {aten.sum.dim_IntList}, {aten.logsumexp.default}
# Powers -> what their exponent is multiplied by to be one of e.
POWERS = {aten.exp.default: 1.0, aten.exp2.default: math.log(2)}
_LOGS = {aten.exp.default: aten.log.default, aten.exp2.default: aten.log2.default}
# (scores, dimension, nodes, a factor of the scores)
_Found = tuple[Node, int, list[Node], float]


def less_its_logarithm(node: Node) -> _Found | None:
    """The scores that a power of theirs, less the logarithm of their sum of powers, is the softmax of."""
    inner: Any = node.args[0]
    if node.target is aten.exp2.default and _is_log2_e(times(inner)):
        found = _less(inner.args[0], aten.exp.default)
        return found and (*found[:2], [node, inner, *found[2]], 1.0)
    found = _less(inner, node.target)
    return found and (*found[:2], [node, *found[2]], found[3])


def _is_log2_e(number: float | None) -> bool:
    return number is not None and math.isclose(number, math.log2(math.e), rel_tol=1e-6)


def _less(node: Any, power: Any) -> _Found | None:
    if power is aten.exp.default and node.target is aten.log_softmax.int:
        return node.args[0], node.args[1] % node.meta["val"].dim(), [node], 1.0
    if node.target is not aten.sub.Tensor or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return None
    found = _log_of_sum(node.args[0], node.args[1], power)  # type: ignore[arg-type]
    return found and (node.args[0], found[0], [node, *found[1]], POWERS[power])


def _log_of_sum(scores: Node, node: Node, power: Any) -> tuple[int, list[Node]] | None:
    """(dimension, nodes) where `node` is the logarithm of the sum of powers of `scores`."""
    if power is aten.exp.default and (whole := reduced(node, scores, _LOG_SUMS)) is not None:
        return whole
    shown, (node, nodes) = node, _stripped(node, AROUND_SUMS)
    if power is aten.exp2.default and _is_log2_e(times(node)) and _is_log2_e(times(scores)):
        found = reduced(node.args[0], scores.args[0], _LOG_SUMS, shown)  # type: ignore[arg-type]
        return found and (found[0], [*nodes, node, *found[1]])
    most = None
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, Node) for a in node.args):
        ends = [_stripped(a, AROUND_SUMS) for a in node.args]  # type: ignore[arg-type]
        at = next((n for n, (end, _) in enumerate(ends) if end.target is _LOGS[power]), 0)
        most, nodes = node.args[1 - at], [*nodes, node, *ends[at][1]]  # type: ignore[assignment]
        node = ends[at][0]
    powers: Any = _stripped(node.args[0], AROUND_SUMS)[0] if node.target is _LOGS[power] else node  # type: ignore[arg-type]
    powers = powers.args[0] if powers.target in SUMS else powers
    if powers.target is not power or (found := reduced(node.args[0], powers, SUMS, shown)) is None:  # type: ignore[arg-type]
        return None
    less = powers.args[0]
    own = [] if less is scores and most is None else _of_one_maximum(less, most, scores)
    return None if own is None else (found[0], [*nodes, node, *found[1], powers, *own])


def _of_one_maximum(less: Node, most: Node | None, scores: Node) -> list[Node] | None:
    """The nodes of `less`, `scores` without their maximum, and of `most`, that maximum; None where they are others."""
    maximum = less_maximum(less)
    if most is None or not maximum or less.args[0] is not scores:
        return None
    end, around = _stripped(most, AROUND_MAXIMA)
    # Detached in one place alone, it has a gradient.
    detached = [any(n.target is DETACH for n in chain) for chain in (maximum, around)]
    return [less, *maximum, *around] if end is maximum[-1] and detached[0] == detached[1] else None


def _stripped(node: Node, around: Any) -> tuple[Node, list[Node]]:
    """(what `node` is in views of, these)."""
    *nodes, node = chain(node, around)
    return node, nodes
