"""`match_linear`: which operand is the weight, and which way round it lies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.linear import is_projection, match_linear
from tests.matchers.graphs import trace
from tests.seeds import Draws

draw = Draws(__name__)
X, ROWS, W, V, B = draw(2, 3, 4), draw(3, 4), draw(5, 4), draw(4, 5), draw(5)


@pytest.mark.parametrize(
    ("f", "x", "w", "transposed"),
    [
        (lambda x, w, b: F.linear(x, w, b), X, W, False),
        (lambda x, w, b: x @ w.T, X, W, False),
        (lambda x, w, b: x @ w.transpose(-1, -2), X, W, False),
        (lambda x, w, b: x @ w.permute(1, 0), X, W, False),
        (lambda x, w, b: x @ w, X, V, True),
        (lambda x, w, b: torch.mm(x, w), ROWS, V, True),
        (lambda x, w, b: torch.addmm(b, x, w.t()), ROWS, W, False),
        (lambda x, w, b: torch.einsum("btd,od->bto", x, w), X, W, False),
        (lambda x, w, b: torch.einsum("do,btd->bto", w, x), X, V, True),
    ],
)
def test_matches(f, x, w, transposed):
    graph = trace(f, x, w, B)
    found = match_linear(graph.output)
    assert (found.node, found.x, found.w) == (graph.output, *graph.inputs[:2])
    assert found.transposed == transposed and found.out_features == 5
    assert found.b in (None, graph.inputs[2]) and (found.b is not None) == any(n.users for n in graph.inputs[2:])


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x, y: x @ y, (X, draw(2, 4, 5))),
        (lambda x, w: x * w, (X, B[:4])),
        (lambda x, w, b: torch.addmm(b, x, w, alpha=2.0), (ROWS, V, B)),
        (lambda x, w, b: torch.addmm(b, x, w), (ROWS, V, draw(3, 5))),
        (lambda x, w: torch.einsum("btd,bd->bt", x, w), (X, W[:2])),
        (lambda x, w: torch.einsum("tbd,od->bto", x, w), (X, W)),
    ],
    ids=["batched", "elementwise", "scaled", "matrix_added", "no_outputs", "transposes_too"],
)
def test_refuses(f, args):
    graph = trace(f, *args)
    assert match_linear(graph.output) is None and not is_projection(graph.output)
    assert match_linear(graph.inputs[0]) is None
