"""Writes symbolic sizes that are the same number for all symbols as that number.

A view with one size to infer divides: channels of `x.view(B, T, -1, 16).view(B, T, heads, -1)` may come as
64 s // (4 s * s // s), which is 16 for every s, but not by torch's own simplification. As a number they are what a
matcher may go by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from megacpp_compile._torch.fakes import FakeTensorMode
from megacpp_compile.fx.numbers_for_symbols import divided, expression, with_numbers


def divided_sizes(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Replace sizes that are one number, in fake values and where the graph computes them."""

    def number(size: Any) -> Any:
        expr = expression(size)
        exact = expr if expr is None else divided(expr)
        return int(exact) if exact is not None and exact.is_Integer else size

    def of_value(v: Any) -> Any:
        if isinstance(v, (list, tuple)):
            return type(v)(map(of_value, v))
        divides = isinstance(v, torch.Tensor) and any(number(n) is not n for n in v.shape)
        return with_numbers(v, number) if divides or isinstance(v, torch.SymInt) else v

    with fake_mode, torch.no_grad():
        for node in graph.nodes:
            old = node.meta.get("val")
            new = of_value(old)
            if isinstance(old, torch.SymInt) and isinstance(new, int):
                _replace(node, new)
            elif isinstance(old, (torch.Tensor, list, tuple)):
                node.meta["val"] = new


def _replace(node: Node, number: int) -> None:
    for user in list(node.users):
        user.args, user.kwargs = (
            fx.map_arg(given, lambda n: number if n is node else n) for given in (user.args, user.kwargs)
        )
