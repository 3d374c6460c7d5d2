"""Values that are the same either way where an expert has no tokens, because they have no rows there."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true


def same_without_rows(condition: Any, taken: bool, one: Tensor, other: Tensor) -> bool:
    """Whether fake tensors `one` and `other` are alike and hold nothing wherever `condition`, a number or a truth
    value, is not as it was `taken`."""
    count = _counted(condition, taken)
    if count is None or (one.dtype, one.device, one.dim()) != (other.dtype, other.device, other.dim()):
        return False
    shapes = [[_at_zero(size, count) for size in t.shape] for t in (one, other)]
    return shapes[0] == shapes[1] and sympy.Integer(0) in shapes[0]


def same_shapes(one: Tensor, other: Tensor) -> bool:
    """Whether fake tensors `one` and `other` are alike, with a number of rows that is known at run time only."""
    if (one.dtype, one.device, one.dim()) != (other.dtype, other.device, other.dim()) or not one.dim():
        return False
    rows = isinstance(one.shape[0], torch.SymInt) and bool(free_unbacked_symbols(one.shape[0]))
    return rows and all(statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True))


def _counted(condition: Any, taken: bool) -> sympy.Symbol | None:
    """The size that is 0 wherever `condition` is not as it was `taken`."""
    expr = condition.node.expr if isinstance(condition, (torch.SymInt, torch.SymBool)) else None
    if expr is None or len(expr.free_symbols) != 1:
        return None
    (symbol,) = expr.free_symbols
    if isinstance(condition, torch.SymInt):
        truth = taken and (expr / symbol).is_Integer and expr != 0
        return symbol if truth else None
    if not isinstance(expr, sympy.core.relational.Relational):
        return None
    sides = [side for side in expr.args if side.is_Integer]
    # Compared with 0 or 1, a multiple of a size is from 1 on what it is at 2.
    multiple = any((side / symbol).is_Integer for side in expr.args if side.free_symbols)
    if not multiple or sides not in ([sympy.Integer(0)], [sympy.Integer(1)]):
        return None
    told = [bool(expr.xreplace({symbol: sympy.Integer(n)})) for n in (0, 1, 2)]
    return symbol if told == [not taken, taken, taken] else None


def _at_zero(size: Any, count: sympy.Symbol) -> Any:
    expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
    return expr.xreplace({count: sympy.Integer(0)})
