"""What a head's lanes come from."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from megacpp_compile._torch.ops import HigherOrderOperator, aten
from megacpp_compile.fx.arithmetic import SCALINGS
from megacpp_compile.fx.edit import value
from megacpp_compile.fx.views import COMPOSITE_PERMUTATIONS, FOLDS, PERMUTATIONS, RESHAPES, SPLITS, UNIT_DIMS
from megacpp_compile.lowerings._registry import semantic_ops
from megacpp_compile.matchers.linear import is_projection
from megacpp_compile.matchers.rope.rotation import Part
from megacpp_compile.matchers.views import cut_from, is_outer_view
from megacpp_compile.reader.links import through

_MOVES = RESHAPES | FOLDS | UNIT_DIMS | PERMUTATIONS | COMPOSITE_PERMUTATIONS


def from_projection(part: Part) -> bool:
    """Whether a head's lanes come straight from a linear (or from outside the graph), or between ranks from one."""
    node = _origin(part.source.node)
    while (sent := _sent(node)) is not None:
        node = _origin(sent)
    return node.op == "placeholder" or is_projection(node) or node.target in semantic_ops()


def _sent(node: Node) -> Node | None:
    """What an autograd function or a collective is called with, as where ranks gather or sum what they share."""
    collective = str(getattr(node.target, "namespace", "")) == "_c10d_functional"
    if not collective and not isinstance(node.target, HigherOrderOperator):
        return None
    given = [a for a in node.all_input_nodes if isinstance(value(a), torch.Tensor)]
    return given[0] if len(given) == 1 else None


def _origin(node: Node) -> Node:
    """What `node` is a part or view of; of an op with several results, the op."""
    return through(node, cut_from, _whole, is_outer_view, _MOVES, _by_a_number)


def _whole(item: Node) -> Node | None:
    """What `item` is one of several parts of; of an op with several results, the op."""
    if item.target is not operator.getitem:
        return None
    return through(item.args[0], SPLITS, aten.unbind.int)


def _by_a_number(node: Node) -> bool:
    return node.target in SCALINGS and not isinstance(value(node.args[1]), torch.Tensor)
