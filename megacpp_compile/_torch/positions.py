"""Positions of a loop as symbols of Dynamo's, which nothing may come to know."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from megacpp_compile._torch import variables
from megacpp_compile._torch._registry import find

PATHS = {
    "SliceVariable": "torch._dynamo.variables.lists.SliceVariable",
    "SymNodeVariable": "torch._dynamo.variables.SymNodeVariable",
    "ConstantSource": "torch._dynamo.source.ConstantSource",
    "DimDynamic": "torch.fx.experimental.symbolic_shapes.DimDynamic",
    "ValueRanges": "torch.utils._sympy.value_ranges.ValueRanges",
}
_HINT = 7


def installable() -> bool:
    """Whether Dynamo is built as this needs."""
    return all(find(path) is not None for path in PATHS.values())


@dataclasses.dataclass
class Position:
    """A symbol, and between which numbers it is."""

    symbol: Any
    bounds: Any


def position(translator: Any, op: Any, loop: int, count: int) -> tuple[Position, Any]:
    """A symbol from 0 to `count`, and what Dynamo holds for it. op: is called for it in the graph, with `loop` and
    `count`."""
    output = translator.output
    env, tracer = output.shape_env, output.current_tracer
    source, hint = find(PATHS["ConstantSource"])(f"megacpp_loop_{loop}"), min(_HINT, count - 1)
    symbol = env.create_unspecified_symbol(hint, source, find(PATHS["DimDynamic"]).DYNAMIC)
    env.var_to_range[symbol] = bounds = find(PATHS["ValueRanges"])(0, count - 1)
    number = env.create_symintnode(symbol, hint=hint, source=source)
    proxy = output.create_proxy("call_function", op, (loop, count), {})
    tracer.bound_symbols[symbol] = proxy  # else it would become an input
    return Position(symbol, bounds), find(PATHS["SymNodeVariable"]).create(translator, proxy, number)


def scaled(translator: Any, position: Any, stride: int, start: int) -> Any:
    """What Dynamo holds for `position * stride + start`. position: a number, or what it holds for a symbol."""
    if type(position) is int:
        return variables.constant(position * stride + start)
    made = position
    for function, operand, neutral in ((operator.mul, stride, 1), (operator.add, start, 0)):
        if operand != neutral:
            number, proxy = function(made.sym_num, operand), (made.as_proxy(), operand)
            proxy = translator.output.create_proxy("call_function", function, proxy, {})
            made = find(PATHS["SymNodeVariable"]).create(translator, proxy, number)
    return made


def unknown(translator: Any, at: Position) -> bool:
    """Whether nothing has come to know, or to depend on, where the position is. Where it was compared with a size that
    is a symbol, as it is when it chooses a row, the guard is on the first and the last position instead."""
    env = translator.output.shape_env
    guards = [guard for guard in env.guards if at.symbol in guard.expr.free_symbols]
    guarded = not all(_holds_throughout(env, guard.expr, at) for guard in guards)
    env.guards[:] = [guard for guard in env.guards if guarded or guard not in guards]
    deferred = getattr(env, "deferred_runtime_asserts", {})
    asserted = any(at.symbol in each.expr.free_symbols for found in deferred.values() for each in found)
    known = guarded or asserted or at.symbol in env.replacements
    return not known and bool(env.var_to_range.get(at.symbol) == at.bounds)


def _holds_throughout(env: Any, relation: Any, at: Position) -> bool:
    """Whether inequalities that are linear in the position hold at its ends, and so between; guards that they do."""
    if isinstance(relation, sympy.And):
        return all(_holds_throughout(env, each, at) for each in relation.args)
    if getattr(relation, "rel_op", "") not in ("<", "<=", ">", ">="):
        return False
    if not sympy.diff(relation.lhs - relation.rhs, at.symbol).is_number:
        return False
    if at.symbol in relation.lts.free_symbols:  # the last of its rows is the tensor's last: the size is the loop's
        each = sympy.diff(relation.lts, at.symbol)
        left = relation.gts - relation.lts.subs(at.symbol, at.bounds.upper if each > 0 else at.bounds.lower)
        one_part = (1, abs(each), 0)  # behind a row, the start of a slice, and its end
        any(bool(env.evaluate_expr(sympy.Eq(left, each))) for each in dict.fromkeys(one_part))
    ends = (relation.subs(at.symbol, end) for end in (at.bounds.lower, at.bounds.upper))
    return all(bool(env.evaluate_expr(end)) for end in ends)


def known(size: Any) -> int | None:
    """A number that a size is, or that guards have made of it; None for a symbol."""
    return size if type(size) is int else size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None


def likely(size: Any) -> int | None:
    """What a size is in the call that is traced; None where only running it tells, and for what is no size."""
    return size if type(size) is int else size.node.hint if isinstance(size, torch.SymInt) else None


def is_symbol(variable: Any) -> bool:
    """Whether Dynamo holds a number that is made of symbols."""
    if not isinstance(variable, find(PATHS["SymNodeVariable"])):
        return False
    number = variable.sym_num
    return isinstance(number, torch.SymInt) and bool(number.node.expr.free_symbols)


def is_slice(variable: Any, whole: bool = False) -> bool:
    """Whether `variable` is a slice; with `whole`, one of everything."""
    if not isinstance(variable, find(PATHS["SliceVariable"])):
        return False
    return not whole or variable.is_python_constant() and variable.as_python_constant() == slice(None)
