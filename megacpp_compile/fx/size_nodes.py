"""Nodes for symbolic sizes. Written into a graph as they are, symbols would be names that its code does not know."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, same_size, value
from megacpp_compile.fx.numbers_for_symbols import expression

# What sizes are computed of symbols by; torch's own classes by name, as they are private.
_OF_SYMBOLS = {
    "Add": operator.add, "Mul": operator.mul, "Pow": operator.pow, "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
}  # fmt: skip


def reshaped(build: Builder, node: Node, shape: Sequence[Any]) -> Node:
    """`node` with sizes `shape`, any of which may be symbolic."""
    return build(torch.ops.aten.reshape.default, node, [size_node(build, n) for n in shape])


def size_node(build: Builder, size: Any) -> int | Node:
    """A number, or a node for a symbolic `size`: an input or the size of a tensor in front of the builder's anchor, or
    what is computed of those.

    Raises LookupError where a symbol in it is the size of nothing there.
    """
    if isinstance(size, int):
        return size
    if (node := _read(build, size, None)) is not None:
        return node
    if (expr := expression(size)) is None:
        raise LookupError(f"{size} is the size of nothing in front of {build.anchor}")
    return _computed(build, expr)


def _read(build: Builder, size: Any, expr: sympy.Expr | None) -> Node | None:
    """A node that has `size`, or that `expr` is the size of."""

    def same(n: Any) -> bool:
        return same_size(n, size) if expr is None else expression(n) == expr

    for node in build.graph.nodes:
        if node is build.anchor:
            break
        known = value(node)
        if isinstance(known, torch.SymInt) and same(known):
            return node
        if isinstance(known, torch.Tensor):
            dim = next((d for d, n in enumerate(known.shape) if same(n)), None)
            if dim is not None:
                return build(torch.ops.aten.sym_size.int, node, dim)
    return None


def _computed(build: Builder, expr: sympy.Expr) -> Any:
    if expr.is_Integer:
        return int(expr)
    if (node := _read(build, None, expr)) is not None:
        return node
    combine = _OF_SYMBOLS.get(expr.func.__name__)
    if combine is None:
        raise LookupError(f"{expr} is the size of nothing in front of {build.anchor}")
    return functools.reduce(lambda a, b: _combined(build, combine, a, b), (_computed(build, a) for a in expr.args))


def _combined(build: Builder, combine: Any, a: Any, b: Any) -> Any:
    return build(combine, a, b) if isinstance(a, Node) or isinstance(b, Node) else combine(a, b)
