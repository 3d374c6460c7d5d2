"""What guards let a symbolic size be. A loop unrolled over chunks fixes how many there are, and so all of a length but
what is in the last: a range where the loop counts up to the length, an equation of a quotient where a split makes the
chunks."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

FEW = 64  # as far apart may guards leave the lengths whose chunks are cut out one by one


def in_turn(size: torch.SymInt, turn: int) -> int | None:
    """`size` where its symbols are as large, and in another turn as small, as guards let them be; None where that is
    not known, or far apart."""
    at = {}
    for symbol in size.node.expr.free_symbols:
        allowed = _allowed(size.node.shape_env, symbol)
        if allowed is None:
            return None
        at[symbol] = allowed[0] if turn % 2 else allowed[1]
    return int(size.node.expr.xreplace(at))


def _allowed(env: Any, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """The least and the most that `symbol` may be; None where these are far apart."""
    known = env.var_to_range.get(symbol)
    if known is not None and known.upper - known.lower < FEW:
        return int(known.lower), int(known.upper)
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val  # the name it had
    if (hint := values.get(symbol)) is None:
        return None
    guards = [guard.expr for guard in env.guards if guard.expr.free_symbols == {symbol}]
    ends = [_furthest(int(hint), step, symbol, guards) for step in (-1, 1)]
    return None if None in ends or ends[1] - ends[0] >= FEW else (ends[0], ends[1])  # type: ignore[operator, return-value]


def _furthest(start: int, step: int, symbol: sympy.Symbol, guards: list[Any]) -> int | None:
    """The last number before one that a guard excludes; None where that is none of the next few."""
    for n in range(start + step, start + step * (FEW + 1), step):
        if any(guard.xreplace({symbol: sympy.Integer(n)}) == sympy.false for guard in guards):
            return n - step
    return None
