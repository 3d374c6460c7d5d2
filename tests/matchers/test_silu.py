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


SILUS = {
    "silu": lambda x: F.silu(x), "x_sigmoid": lambda x: x * torch.sigmoid(x),
    "sigmoid_x": lambda x: torch.sigmoid(x) * x, "quotient": lambda x: x / (1 + torch.exp(-x)),
    "one_over": lambda x: x * (1 / (1 + torch.exp(-x))), "reciprocal": lambda x: x * (torch.exp(-x) + 1).reciprocal(),
}  # fmt: skip
IN_A_WIDER_DTYPE = {
    "rounded": lambda x: x * torch.sigmoid(x.float()).bfloat16(),
    "first": lambda x: torch.sigmoid(x.float()).type_as(x) * x, "promoted": lambda x: x * torch.sigmoid(x.float()),
    "both": lambda x: x.float() * torch.sigmoid(x.float()),
}  # fmt: skip


@pytest.mark.parametrize(("f", "dtype"), [
    *((f, torch.float32) for f in SILUS.values()), *((f, torch.bfloat16) for f in IN_A_WIDER_DTYPE.values()),
], ids=[*SILUS, *IN_A_WIDER_DTYPE])  # fmt: skip
def test_matches(f, dtype):
    graph = trace(f, X.to(dtype))
    x, nodes = match_silu(graph.output)
    assert x is graph.inputs[0] and nodes == graph.calls


OTHERS = {
    "another_gate": lambda x, y: x * torch.sigmoid(y), "another_numerator": lambda x, y: y / (1 + torch.exp(-x)),
    "two": lambda x, y: x / (2 + torch.exp(-x)), "wrong_sign": lambda x, y: x / (1 + torch.exp(x)),
    "rounds": lambda x, y: torch.div(x, 1 + torch.exp(-x), rounding_mode="floor"),
    "gelu": lambda x, y: F.gelu(x), "of what is narrower": lambda x, y: x * torch.sigmoid(x.bfloat16()),
    "narrower": lambda x, y: x * torch.sigmoid(x).bfloat16(),
}  # fmt: skip


@pytest.mark.parametrize("f", OTHERS.values(), ids=OTHERS)
def test_refuses(f):
    assert match_silu(trace(f, X, Y).output) is None


def test_sigmoid_is_matched_alone():
    for f in (torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x))):
        graph = trace(f, X)
        assert match_sigmoid(graph.output)[0] is graph.inputs[0]
        assert match_silu(graph.output) is None
    assert match_sigmoid(trace(lambda x: 2 / (1 + torch.exp(-x)), X).output) is None
    assert match_silu(1.0) is None and match_sigmoid(None) is None
