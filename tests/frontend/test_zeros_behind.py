"""Zeros that are concatenated behind a tensor pad it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.frames import Function, run
from tests.matchers.graphs import trace

aten = torch.ops.aten
PADDED = {
    "zeros": lambda x: torch.cat((x.exp(), torch.zeros(3, 2, 5)), 1),
    "new zeros, in front of the last dimensions": lambda x: torch.cat([x.exp(), x.new_zeros(2, 4, 5)]),
    "full of zeros, from the end": lambda x: torch.cat((x.exp(), torch.full((3, 4, 1), 0.0)), -1),
    "like a part": lambda x: torch.cat((x.exp(), torch.zeros_like(x[:, :1])), 1),
}
LEFT = {
    "ones": lambda x: torch.cat((x.exp(), torch.ones(3, 2, 5)), 1),
    "zeros in front": lambda x: torch.cat((torch.zeros(3, 2, 5), x.exp()), 1),
    "more parts": lambda x: torch.cat((x.exp(), x, torch.zeros(3, 2, 5)), 1),
    "another dtype": lambda x: torch.cat((x.exp(), torch.zeros(3, 2, 5, dtype=torch.float64)), 1),
    "zeros alone": lambda x: torch.cat((torch.zeros(3, 2, 5), torch.zeros(3, 2, 5)), 1) + x[:, :1],
}


def outcome(f):
    """How often the graph of `f` pads, and how often it concatenates."""
    x = torch.randn(3, 4, 5)
    traced = trace(f, x)
    got = torch.fx.GraphModule(nn.Module(), traced.graph)(x)
    got = got[0] if isinstance(got, (tuple, list)) else got
    assert got.equal(f(x)) and got.dtype == f(x).dtype and got.stride() == f(x).stride()
    return [len(traced.graph.find_nodes(op="call_function", target=t)) for t in (aten.pad.default, aten.cat.default)]


@pytest.mark.parametrize("f", PADDED.values(), ids=list(PADDED))
def test_pads(f):
    assert outcome(f) == [1, 0]


@pytest.mark.parametrize("f", LEFT.values(), ids=list(LEFT))
def test_leaves(f):
    assert outcome(f) == [0, 1]


def test_symbolic_numbers_of_zeros():
    def f(x):
        return torch.cat((x.exp(), x.new_zeros(x.shape[0], -x.shape[1] % 4, 5)), 1)

    x = torch.randn(2, 6, 5)
    frames = run(Function(f), (x,), dynamic=True)
    (analysis,) = frames.analyses
    (pad,) = analysis.captured.gm.graph.find_nodes(op="call_function", target=aten.pad.default)
    assert isinstance(pad.args[1][-1], torch.fx.Node)
    for length in (6, 7, 9):
        x = torch.randn(3, length, 5)
        assert frames.compiled(x).equal(f(x))
