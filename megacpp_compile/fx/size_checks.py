"""Run-time checks of sizes that hold whatever the data: torch adds them, and they keep what they check in the graph."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import drop_dead, same_sizes, value

# Ops that find the places that are not zero, with one argument.
FINDS = (aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default)


def drop_certain_bounds(graph: fx.Graph) -> None:
    """Erase checks that there are no more and no fewer places that are not zero than there may be, no fewer counts than
    were asked for, no more distinct numbers than numbers, and no truth values but 0 and 1."""
    for check in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        bound = check.args[0]
        if isinstance(bound, Node) and _holds(bound):
            graph.erase_node(check)


def drop_counts_of_masks(graph: fx.Graph) -> None:
    """Erase checks that a mask chooses no more rows than it has places, and as many of one tensor as of another."""
    erased = False
    for check in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        bound = check.args[0]
        if isinstance(bound, Node) and any(_counted(size) is not None for size in bound.args) and _holds(bound):
            graph.erase_node(check)
            erased = True
    if erased:
        drop_dead(graph)


def _holds(bound: Node) -> bool:
    if bound.target is operator.eq and len(bound.args) == 2:
        masks = [_counted(size) for size in bound.args]
        return None not in masks and same_value(*masks)
    if bound.target not in (operator.ge, operator.le) or len(bound.args) != 2:
        return False
    size, limit = bound.args[0], value(bound.args[1])
    if not isinstance(size, Node) or size.target not in (aten.sym_size.int, torch.sym_ite):
        return False
    range_ = _truth(size) if size.target is torch.sym_ite else _range(size.args[0]) if size.args[1] == 0 else None
    if range_ is None:
        return False
    least, most = range_
    if bound.target is operator.ge:
        return statically_known_true(limit <= least)
    return most is not None and statically_known_true(limit >= most)


def _truth(node: Node) -> tuple[Any, Any] | None:
    """As `_range`, of a truth value as a number."""
    numbers = node.args[1:]
    return (min(numbers), max(numbers)) if all(isinstance(n, int) for n in numbers) else None  # type: ignore[type-var]


def _range(node: Any) -> tuple[Any, Any] | None:
    """(the least, the most) entries that `node` may have; most is None where that depends on data."""
    if node.target is aten.bincount.default:
        return node.args[2] if len(node.args) > 2 else 0, None
    if (mask := mask_of(node)) is not None:
        return 0, math.prod(value(mask).shape)
    found = node.args[0] if node.target is operator.getitem else node
    if found.target is aten._unique2.default:
        return 0, math.prod(value(found.args[0]).shape)
    if found.target not in FINDS or len(found.args) != 1:
        return None
    return 0, math.prod(value(found.args[0]).shape)


def mask_of(node: Any) -> Node | None:
    """The boolean mask that `node` chooses the leading rows of its first argument by, and nothing else."""
    if isinstance(node, Node) and node.target is aten.masked_select.default:
        of, mask = (value(a).shape for a in node.args)
        return node.args[1] if same_sizes(of, mask) else None  # type: ignore[return-value]
    if not isinstance(node, Node) or node.target is not aten.index.Tensor:
        return None
    chosen = list(node.args[1])  # type: ignore[arg-type]
    if len(chosen) != 1 or chosen[0] is None or value(chosen[0]).dtype != torch.bool:
        return None
    return chosen[0]  # type: ignore[no-any-return]


def _counted(size: Any) -> Node | None:
    """The mask whose chosen rows `size` counts."""
    if not isinstance(size, Node) or size.target is not aten.sym_size.int or size.args[1] != 0:
        return None
    return mask_of(size.args[0])


def same_value(a: Any, b: Any) -> bool:
    """Whether two nodes are computed alike from the same values."""
    if a is b:
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if not isinstance(a, Node) or not isinstance(b, Node):
        return type(a) is type(b) and a == b
    if a.op != "call_function" or a.target is not b.target or a.kwargs != b.kwargs or a.is_impure():
        return False
    if torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ()):
        return False
    return len(a.args) == len(b.args) and all(map(same_value, a.args, b.args))
