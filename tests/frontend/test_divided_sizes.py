"""Sizes that are one number for all symbols are written as that number, in values and where they are arguments."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

from megacpp_compile.fx.numbers_for_symbols import divided
from tests.frames import run

s, t = sympy.symbols("s t", integer=True, positive=True)


def floor(a, b):
    return torch.utils._sympy.functions.FloorDiv(a, b)


@pytest.mark.parametrize(("expr", "want"), [
    (floor(4 * s**2, s), 4 * s), (floor(64 * s, floor(4 * s**2, s)), 16), (floor(s * t + s, t + 1), s),
    (1 + floor(6 * s * t, floor(2 * s**2, s)), 1 + 3 * t),
], ids=str)  # fmt: skip
def test_divisions_without_a_rest(expr, want):
    assert divided(expr) == want


@pytest.mark.parametrize("expr", [floor(s, 2), floor(3 * s, 2), floor(s * t + 1, t), floor(t, s), 2 * floor(s, 2)], ids=str)
def test_divisions_with_a_rest_stay(expr):
    assert divided(expr) == expr


class Regrouped(nn.Module):
    """As many heads as 4 times the batch, where `x` comes with as many groups as there are sequences."""

    def forward(self, x):
        b, n, _, _ = x.shape
        heads = x.reshape(b, n, -1, 16)
        return heads.view(b, n, heads.shape[2], -1) * 2.0, (heads + 1).view(b, n, -1)


def test_a_width_is_a_number():
    """The same graph serves every batch that has as many groups."""
    x = torch.randn(3, 5, 3, 64)
    torch._dynamo.mark_static(x, 3)
    frames = run(Regrouped(), (x,), dynamic=True)
    (graph,) = (analysis.captured.gm.graph for analysis in frames.analyses)
    (product,) = (n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    assert product.meta["val"].shape[-1] == 16 and isinstance(product.meta["val"].shape[-1], int)
    for batch, length in ((2, 5), (3, 7), (4, 2)):
        x = torch.randn(batch, length, batch, 64)
        torch._dynamo.mark_static(x, 3)
        for got, want in zip(frames.compiled(x), Regrouped()(x), strict=True):
            torch.testing.assert_close(got, want)
    assert len(frames.graphs) == 1
