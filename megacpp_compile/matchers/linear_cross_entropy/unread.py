"""Log-probabilities of a linear that an unsupported op reduces: reported as near misses."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.arithmetic import SOFTMAXES
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import IDENTITIES, RESHAPES, UNIT_DIMS, is_cast
from megacpp_compile.fx.walks import ancestors, descendants
from megacpp_compile.matchers._match import MatchFailure
from megacpp_compile.matchers.linear import match_linear
from megacpp_compile.matchers.linear_cross_entropy.logits import LOG_SOFTMAX
from megacpp_compile.matchers.numbers import number_of
from megacpp_compile.reader.links import chain, through

_BY_A_NUMBER = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.clamp.default,
                aten.clamp_min.default)  # fmt: skip
REASON = (
    "unread",
    "how the loss takes one log-probability of a row is not known: `cross_entropy`, `gather(-1, labels)`, an index "
    "`[arange(n), labels]` and a product with `one_hot(labels)` that is summed are",
)


def unread(graph: fx.Graph, found: Set[Node]) -> Iterator[MatchFailure]:
    """The log-probabilities of linears of which a loss is made. found: linears and what stands behind them of which the
    report says something already."""
    for node in graph.nodes:
        probabilities = _probabilities(node)
        if probabilities is None:
            continue
        way = _way_from_a_linear(probabilities.args[0])
        if not way or not found.isdisjoint(way) or not any(_is_loss(n) for n in _onward(node)):
            continue
        if _meets_labels(node, way[-1]):
            yield MatchFailure(node, *REASON)


def _probabilities(node: Node) -> Node | None:
    """The softmax over the last dimension of which `node` is the logarithm: itself, or what stands behind `log` but for
    a small number."""
    at = node
    if node.target is aten.log.default:
        at = through(node.args[0], _by_a_number)
        if at.target not in SOFTMAXES:
            return None
    elif node.target not in LOG_SOFTMAX:
        return None
    dim, rank = at.args[1], value(at).dim()
    return at if dim in (-1, rank - 1) else None


def _way_from_a_linear(node: object) -> list[Node]:
    """From `node` back to the linear whose words it has, reshaped, cast, or changed by a number; else empty."""
    alike = RESHAPES | UNIT_DIMS | IDENTITIES
    way = chain(node, lambda n: match_linear(n) is None and (n.target in alike or is_cast(n) or _by_a_number(n)))
    return way if isinstance(way[-1], Node) and match_linear(way[-1]) is not None else []


def _by_a_number(node: Node) -> bool:
    return node.target in _BY_A_NUMBER and all(number_of(a) is not None for a in node.args[1:])


def _onward(node: Node) -> set[Node]:
    """What is computed of `node`."""
    return set(descendants(node.users))


def _is_loss(node: Node) -> bool:
    held = value(node) if node.op == "call_function" else None
    return isinstance(held, torch.Tensor) and held.dim() == 0 and held.is_floating_point()


def _meets_labels(node: Node, linear: Node) -> bool:
    """Whether whole numbers or flags, or what is made of them beside the way to `linear`, join what a number is made of
    `node` by. An entropy, as a router's, or a divergence of two softmaxes has none."""
    cone = set(descendants([node], lambda user: not _is_loss(user)))  # further on other losses are added
    joined = {a for n in cone for user in n.users for a in user.all_input_nodes}
    behind, left = _ancestors({linear}, set()), joined - cone
    return any(_counts(n) for n in left | _ancestors(left, behind | cone))


def _ancestors(nodes: Set[Node], stop: Set[Node]) -> set[Node]:
    """`nodes` and all they are computed from but `stop` and what only that is computed from."""
    return set(ancestors(nodes - stop, lambda n: n not in stop))


def _counts(node: Node) -> bool:
    held = value(node)
    return isinstance(held, torch.Tensor) and not held.is_floating_point() and not held.is_complex()
