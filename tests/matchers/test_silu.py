"""`match_silu` and `match_sigmoid`: the function, and the nodes it is made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megacpp_compile.matchers.silu import match_sigmoid, match_silu
from tests.matchers.graphs import trace
from tests.seeds import Draws

draw = Draws(__name__)
X, Y = draw(3, 4), draw(3, 4)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.silu(x),
        lambda x: x * torch.sigmoid(x),
        lambda x: torch.sigmoid(x) * x,
        lambda x: x / (1 + torch.exp(-x)),
        lambda x: x * (1 / (1 + torch.exp(-x))),
        lambda x: x * (torch.exp(-x) + 1).reciprocal(),
    ],
    ids=["silu", "x_sigmoid", "sigmoid_x", "quotient", "one_over", "reciprocal"],
)
def test_matches(f):
    graph = trace(f, X)
    x, nodes = match_silu(graph.output)
    assert x is graph.inputs[0]
    assert nodes == {n for n in graph.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x * torch.sigmoid(y),
        lambda x, y: y / (1 + torch.exp(-x)),
        lambda x, y: x / (2 + torch.exp(-x)),
        lambda x, y: x / (1 + torch.exp(x)),
        lambda x, y: torch.div(x, 1 + torch.exp(-x), rounding_mode="floor"),
        lambda x, y: F.gelu(x),
    ],
    ids=["another_gate", "another_numerator", "two", "wrong_sign", "rounds", "gelu"],
)
def test_refuses(f):
    graph = trace(f, X, Y)
    assert match_silu(graph.output) is None


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * torch.sigmoid(x.float()).bfloat16(),
        lambda x: torch.sigmoid(x.float()).type_as(x) * x,
        lambda x: x * torch.sigmoid(x.float()),
        lambda x: x.float() * torch.sigmoid(x.float()),
    ],
    ids=["rounded", "first", "promoted", "both"],
)
def test_a_sigmoid_in_a_wider_dtype(f):
    graph = trace(f, X.bfloat16())
    x, nodes = match_silu(graph.output)
    assert x is graph.inputs[0] and nodes == {n for n in graph.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize(
    "f",
    [lambda x: x * torch.sigmoid(x.bfloat16()), lambda x: x * torch.sigmoid(x).bfloat16()], ids=["of", "result"],
)  # fmt: skip
def test_a_sigmoid_in_a_narrower_dtype_is_none(f):
    assert match_silu(trace(f, X).output) is None


def test_sigmoid_is_matched_alone():
    for f in (torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x))):
        graph = trace(f, X)
        assert match_sigmoid(graph.output)[0] is graph.inputs[0]
        assert match_silu(graph.output) is None
    assert match_sigmoid(trace(lambda x: 2 / (1 + torch.exp(-x)), X).output) is None
    assert match_silu(1.0) is None and match_sigmoid(None) is None
