"""What guards let a symbolic size be. A loop unrolled over chunks fixes how many there are, and so all of a length but
what is in the last: a range where the loop counts up to the length, an equation of a quotient where a split makes the
chunks. And which sizes of a frame's inputs are one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph

from megacpp_compile.errors._attempts import NoMatch, or_none
from megacpp_compile.fx.edit import same_size, value
from megacpp_compile.matchers.ssd.atoms import number

FEW = 64  # as far apart may guards leave the lengths whose chunks are cut out one by one


@or_none
def in_turn(size: torch.SymInt, turn: int) -> int | None:
    """`size` where its symbols are as large, and in another turn as small, as guards let them be; None where that is
    not known, or far apart."""
    at = {}
    for symbol in size.node.expr.free_symbols:
        allowed = NoMatch.unless(_allowed(size.node.shape_env, symbol))
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
    known_now = (env.replace(guard.expr) for guard in env.guards)  # symbols may have become one since
    guards = [expr for expr in known_now if expr.free_symbols == {symbol}]
    ends = [_furthest(int(hint), step, symbol, guards) for step in (-1, 1)]
    return None if None in ends or ends[1] - ends[0] >= FEW else (ends[0], ends[1])  # type: ignore[operator, return-value]


def _furthest(start: int, step: int, symbol: sympy.Symbol, guards: list[Any]) -> int | None:
    """The last number before one that a guard excludes; None where that is none of the next few."""
    def excluded(n: int) -> bool:
        return any(guard.xreplace({symbol: sympy.Integer(n)}) == sympy.false for guard in guards)

    return next((n - step for n in range(start + step, start + step * (FEW + 1), step) if excluded(n)), None)


def join_lengths(graph: Graph) -> bool:
    """Have torch take sizes of a frame's inputs that are equal now for one, whether any was not yet: the queries and
    keys of a recurrence have as many tokens, which no guard says where each input has a symbol of its own. The frame is
    compiled again for inputs where they differ. Two sizes of one input stay two."""
    known: dict[tuple[int, int], torch.SymInt] = {}
    env: Any = None
    for node in graph.find_nodes(op="placeholder"):
        given, equal = value(node), Counter[int]()
        for size in given.shape if isinstance(given, torch.Tensor) else ():
            if not isinstance(size, torch.SymInt) or number(size) is not None or (now := size.node.hint) is None:
                continue
            first = known.setdefault((now, equal[now]), size)
            equal[now] += 1
            if not same_size(first, size) and first == size:
                env = size.node.shape_env
    for guard in list(env.guards) if env is not None else ():  # what is known of the one is known of the other
        expr = env.replace(guard.expr)
        if isinstance(expr, sympy.Eq) and expr != guard.expr:
            bool(env.create_symboolnode(expr))
    return env is not None
