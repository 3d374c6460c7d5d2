"""Run-time checks of sizes that hold whatever the data: torch adds them, and they keep what they check in the graph."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.fx.edit import value

aten = torch.ops.aten
# Ops that find the places that are not zero, with one argument.
FINDS = (aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default)


def drop_certain_bounds(graph: fx.Graph) -> None:
    """Erase checks that there are no more and no fewer places that are not zero than there may be, no fewer counts than
    were asked for, and no more distinct numbers than numbers."""
    for check in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        bound = check.args[0]
        if isinstance(bound, Node) and _holds(bound):
            graph.erase_node(check)


def _holds(bound: Node) -> bool:
    if bound.target not in (operator.ge, operator.le) or len(bound.args) != 2:
        return False
    size, limit = bound.args[0], value(bound.args[1])
    if not isinstance(size, Node) or size.target is not aten.sym_size.int or size.args[1] != 0:
        return False
    range_ = _range(size.args[0])
    if range_ is None:
        return False
    least, most = range_
    if bound.target is operator.ge:
        return statically_known_true(limit <= least)
    return most is not None and statically_known_true(limit >= most)


def _range(node: Any) -> tuple[Any, Any] | None:
    """(the least, the most) entries that `node` may have; most is None where that depends on data."""
    if node.target is aten.bincount.default:
        return node.args[2] if len(node.args) > 2 else 0, None
    found = node.args[0] if node.target is operator.getitem else node
    if found.target is aten._unique2.default:
        return 0, math.prod(value(found.args[0]).shape)
    if found.target not in FINDS or len(found.args) != 1:
        return None
    return 0, math.prod(value(found.args[0]).shape)
