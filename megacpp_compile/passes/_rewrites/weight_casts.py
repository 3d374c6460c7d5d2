"""Which weights can be cast to float8 outside of their frame, once for several calls (option `cache_weight_casts`).

It is those that are made of one parameter by views and casts: what the frame computes of it may be computed in front of
the frame. A weight that ranks gather in the frame stays: its shards are what the ranks keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from megacpp_compile._torch.ops import OpOverload
from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.frontend.capture import PARAMETER
from megacpp_compile.fx.edit import Builder, value

NOTE = "weights cast once in cached_weight_casts()"
_METHODS = frozenset({"to_local"})
# ATen's views, and casts.
_MOVES = frozenset({
    "_to_copy", "_unsafe_view", "alias", "clone", "contiguous", "detach", "expand", "flatten", "lift_fresh", "mT",
    "movedim", "narrow", "permute", "reshape", "select", "slice", "squeeze", "t", "to", "transpose", "unflatten",
    "unsqueeze", "view", "view_as",
})  # fmt: skip


def chain(weight: Node) -> tuple[Node, list[Node]]:
    """(the first node in front of `weight` that is an input or more than a view or cast, those from there to `weight`,
    first to last)."""
    node, steps = weight, list[Node]()
    while (operand := _operand(node)) is not None:
        steps.insert(0, node)
        node = operand
    return node, steps


def not_cacheable(weights: Sequence[Node]) -> str:
    """Why a cast of `weights` has to be made in the frame, "" where it need not."""
    for weight in weights:
        origin, _ = chain(weight)
        if origin.op != "placeholder":
            return "cast in every call, as a weight is computed or gathered here"
        if not origin.meta.get(PARAMETER):
            return "cast in every call, as a weight is no parameter"
    return ""


def detached(build: Builder, weights: Sequence[Node]) -> list[Node]:
    return [build(torch.ops.aten.detach.default, w) for w in weights]


@or_none
def _operand(node: Node) -> Node | None:
    """What `node` is a view or cast of, and of nothing else; None where it is none."""
    operands = node.all_input_nodes
    NoMatch.when(
        len(operands) != 1 or not isinstance(value(node), Tensor) or not isinstance(value(operands[0]), Tensor)
    )
    if node.op == "call_method":
        return operands[0] if node.target in _METHODS else None
    target = node.target
    NoMatch.when(node.op != "call_function" or not isinstance(target, OpOverload) or target.namespace != "aten")
    return operands[0] if target._opname in _MOVES else None
