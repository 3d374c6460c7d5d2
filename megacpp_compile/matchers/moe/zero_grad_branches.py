"""The way that a branch takes for an expert without tokens, where all it does is to give its parameters a gradient.

    if mask.any(): ...                                  out = expert(x[mask])
    else: y[0, 0] += 0 * sum(p.sum() for p in own)      y[mask] = out if len(out) else out + 0 * sum(...)

A product with 0 adds nothing, whatever the parameters are as long as they are finite; what is written back as it was
read, or written over in the same places, changes nothing either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.assumptions import Region
from megacpp_compile.fx.edit import has_effects, same_shape, value
from megacpp_compile.fx.views import CASTS
from megacpp_compile.fx.walks import ancestors
from megacpp_compile.matchers.graph_view import GraphView
from megacpp_compile.matchers.views import RESHAPES
from megacpp_compile.reader.links import through

aten = torch.ops.aten
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default)
_READ_BY: dict[Any, Any] = {  # what writes a part back -> what reads it
    aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Zeros:
    """Parameters that a way gives a gradient of zeros."""

    way: Region
    parameters: frozenset[Node]


def without_zero_grad_branches(view: GraphView, regions: Sequence[Region]) -> tuple[list[Region], list[Zeros]]:
    """(`regions` without what adds nothing, which is erased; what it gives zeros as a gradient)."""
    zeros = list[Zeros]()
    for region in regions:
        given = set[Node]()
        for node in sorted(region.nodes):
            kept = _kept(node)
            if kept is None or kept[0] is node:
                continue
            source, added = kept
            if added is not None and node.users and view.mode_states[node].grad:
                given |= _read_by(added) & view.trained
            node.replace_all_uses_with(source)
        if given:
            zeros.append(Zeros(region, frozenset(given)))
    asked = {n for region in regions if isinstance(region.condition, Node) for n in _read_by(region.condition)}
    for node in sorted({n for region in regions for n in region.nodes} - asked, reverse=True):
        if not node.users and node.op == "call_function" and not has_effects(node):
            view.graph.erase_node(node)
    left = set(view.graph.nodes)
    return [dataclasses.replace(region, nodes=region.nodes & left) for region in regions], zeros


def _kept(node: Node) -> tuple[Node, Node | None] | None:
    """(what `node` is the same as, what it adds to that, which is zero); None where it is something of its own."""
    target, args = node.target, node.args
    if target is aten.add.Tensor and not node.kwargs:
        for source, added in (args, args[::-1]):
            if isinstance(source, Node) and isinstance(added, Node) and _is_zero(added) and _alike(source, node):
                return source, added
    if target in _READ_BY and _alike(args[0], node):  # type: ignore[arg-type]
        part: Any = args[1]
        read = part.target is _READ_BY[target] and _same(part.args[0], args[0]) and part.args[1:] == args[2:]
        return (args[0], None) if read else None  # type: ignore[return-value]
    if target is aten.index_put.default and not any(args[3:]):
        before: Any = args[0]
        if before.target is target and not any(before.args[3:]) and _same_places(before.args[1], args[1]):
            node.update_arg(0, before.args[0])
    return None


def _is_zero(node: Node) -> bool:
    """Whether `node` is zero wherever what it is computed from is finite."""
    node = through(node, _SUMS, CASTS, RESHAPES)
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        return any(not isinstance(factor, Node) and factor == 0 for factor in node.args)
    return node.target is aten.add.Tensor and all(isinstance(n, Node) and _is_zero(n) for n in node.args)


def _alike(source: Node, node: Node) -> bool:
    return value(source).dtype == value(node).dtype and same_shape(source, node)


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same, or computed alike from the same."""
    if not isinstance(one, Node) or not isinstance(other, Node):
        return type(one) is type(other) and one == other
    if one is other:
        return True
    computed = one.op == other.op == "call_function" and one.target is other.target and one.kwargs == other.kwargs
    pure = computed and torch.Tag.nondeterministic_seeded not in getattr(one.target, "tags", ())
    return pure and len(one.args) == len(other.args) and all(map(_same, one.args, other.args))


def _same_places(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))


def _read_by(node: Node) -> set[Node]:
    """All that `node` is computed from."""
    return set(ancestors([node]))
