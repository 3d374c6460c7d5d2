"""A graph as it is where some symbolic sizes are the numbers that they are now."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.fx.edit import value

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Symbols, each with a size that is that symbol.
Numbers = dict[sympy.Symbol, torch.SymInt]


def expression(size: Any) -> sympy.Expr | None:
    """None for a number, and for what is no expression, as ragged sizes are."""
    return getattr(size.node, "expr", None) if isinstance(size, torch.SymInt) else None


def free_symbols(size: Any) -> set[sympy.Symbol]:
    return set() if (expr := expression(size)) is None else expr.free_symbols


def divided(expr: sympy.Expr) -> sympy.Expr:
    """`expr` without those divisions of whole numbers that leave no rest, whatever the symbols are; sizes that divide
    are not zero."""
    return expr.replace(_divides, _quotient) if expr.has(sympy.Function) else expr


def _divides(expr: sympy.Basic) -> bool:
    return type(expr).__name__ == "FloorDiv"


@functools.lru_cache(maxsize=1024)
def _quotient(division: sympy.Expr) -> sympy.Expr:
    exact = sympy.cancel(division.args[0] / division.args[1])
    if not exact.free_symbols:
        return exact if exact.is_Integer else division
    whole = exact.is_polynomial() and all(c.is_Integer for c in sympy.Poly(exact, *exact.free_symbols).coeffs())
    return exact if whole else division


def with_numbers(v: Any, number: Callable[[Any], Any]) -> Any:
    """A fake tensor or symbolic number with `number` of what symbols it has; itself where that is all the same."""
    if not isinstance(v, torch.Tensor):
        return number(v) if isinstance(v, SYMBOLIC) else v
    old = (*v.shape, *v.stride())
    new = [n if isinstance(n, int) else number(n) for n in old]
    if all(map(operator.is_, new, old)):
        return v
    return torch.empty_strided(new[: v.dim()], new[v.dim() :], dtype=v.dtype, device=v.device)


def at_hints(graph: fx.Graph, fake_mode: FakeTensorMode, symbols: Numbers) -> tuple[fx.Graph, dict[Node, Node]]:
    """A copy of `graph` with the hints of `symbols` in their places, made without a guard, and the node that each of
    the copy's stands for."""
    env: Any = fake_mode.shape_env
    numbers = {symbol: sympy.Integer(n.node.hint) for symbol, n in symbols.items()}

    def number(size: Any) -> Any:
        if not free_symbols(size) & symbols.keys():
            return size
        expr = divided(size.node.expr.xreplace(numbers))
        return int(expr) if expr.is_number else env.create_symintnode(expr, hint=size.node.hint)

    def of_value(v: Any) -> Any:
        return type(v)(map(of_value, v)) if isinstance(v, (list, tuple)) else with_numbers(v, number)

    out, copies, given = fx.Graph(), dict[Node, Node](), dict[Node, Node]()

    def argument(node: Node) -> Any:
        v = value(copies[node])
        return v if isinstance(v, int) else copies[node]

    with fake_mode, torch.no_grad():
        for node in graph.nodes:
            copies[node] = copy = out.node_copy(node, argument)  # type: ignore[arg-type]
            given[copy] = node
            if "val" in node.meta:
                copy.meta["val"] = of_value(node.meta["val"])
    return out, given
