"""What is cut out of a tensor along one of its dimensions, and what one is joined of."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.fx import Node

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.fx.views import SPLITS


class Part(NamedTuple):
    """`size` entries of dimension `dim` of `source`, from `start` on and `step` apart; one entry, without the
    dimension, where it is not `kept`. by: the op that cuts, which may make further parts.

    start: as the graph has it, a number, a symbol or a node; negative only where the dimension's size is a symbol.
    """

    source: Node
    dim: int
    start: Any
    size: Any
    step: Any
    kept: bool
    by: Node

    @property
    def whole(self) -> Any:
        """How many entries the source has."""
        return value(self.source).shape[self.dim]

    @property
    def is_run(self) -> bool:
        """Whether it is entries in a row, from a known one on."""
        return self.kept and self.step == 1 and isinstance(self.start, int)


def part_of(node: Node) -> Part | None:
    """The part that `node` is: by `slice`, `select`, or as an item of `split`, `chunk` or `unbind`; else None."""
    if node.target is aten.select.int:
        return _part(node, node.args[1], node.args[2], False)
    if node.target is aten.slice.Tensor:
        _, dim, start, _, step = [*node.args, *(None,) * 4][:5]
        return _part(node, dim or 0, start or 0, True, step or 1)
    several = node.args[0] if node.target is operator.getitem else None
    if not isinstance(several, Node) or not isinstance(node.args[1], int):
        return None
    if several.target is aten.unbind.int:
        return _part(node, _dim(several, 1), node.args[1], False, by=several)
    if several.target in SPLITS:
        dim = _dim(several, 2)
        return _part(node, dim, sum(one.shape[dim] for one in value(several)[: node.args[1]]), True, by=several)
    return None


def column_of(node: Node) -> tuple[Node, int] | None:
    """(tensor, i) where `node` is its entry i along the last of several dimensions, without or with that dimension."""
    part = part_of(node)
    if part is None or part.kept and not same_size(part.size, 1) or part.dim != value(part.source).dim() - 1:
        return None
    known = isinstance(part.start, int) and isinstance(part.whole, int) and part.dim > 0
    return (part.source, part.start) if known else None


def concatenated(node: Node) -> list[Node]:
    """The tensors of which `node` is the concatenation along its first dimension; none where it is none."""
    first = node.target is aten.cat.default and [*node.args, 0][1] in (0, -value(node).dim())
    return list(node.args[0]) if first else []  # type: ignore[arg-type]


def _dim(several: Node, at: int) -> Any:
    return several.args[at] if len(several.args) > at else several.kwargs.get("dim", 0)


def _part(node: Node, dim: Any, start: Any, kept: bool, step: Any = 1, by: Node | None = None) -> Part:
    by = by or node
    source: Any = by.args[0]
    dim %= value(source).dim()
    whole = value(source).shape[dim]
    if isinstance(start, int) and isinstance(whole, int):
        start = max(start + whole, 0) if start < 0 else min(start, whole)
    return Part(source, dim, start, value(node).shape[dim] if kept else 1, step, kept, by)
