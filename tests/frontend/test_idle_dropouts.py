"""Dropouts that drop nothing are in nobody's way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check
from tests.matchers.graphs import trace
from tests.passes.experts import DIM, MoE, Ungated, where_index_add

aten = torch.ops.aten


class Dropping(nn.Module):
    """What comes before, in front of a dropout."""

    def __init__(self, inner, p):
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.inner(x))


def dropping(module, p):
    """`module`, whose experts end in a dropout."""
    module.experts = nn.ModuleList(Dropping(expert, p) for expert in module.experts)
    return module


@pytest.mark.parametrize(("p", "training", "sites"), [(0.0, True, 1), (0.5, False, 1), (0.5, True, 0)])
def test_experts_that_end_in_one(p, training, sites):
    module = dropping(MoE(where_index_add, Ungated), p).train(training)
    frames = check(module, (torch.randn(11, DIM),))
    assert frames.fired.get("moe", 0) == sites
    assert frames.tags("moe") == (set() if sites else {"no-expert"})


@pytest.mark.parametrize(("f", "left"), [
    (lambda x: F.dropout(x.exp(), 0.0).exp(), 0),
    (lambda x: F.dropout(x.exp(), 0.5, training=False).exp(), 0),
    (lambda x: F.dropout(x.exp(), 0.5).exp(), 1),
    (lambda x: F.dropout(x, 0.0), 1),
], ids=["drops none", "in evaluation", "drops", "is returned"])  # fmt: skip
def test_which_go(f, left):
    x = torch.randn(3, 4)
    traced = trace(f, x)
    assert len(traced.graph.find_nodes(op="call_function", target=aten.dropout.default)) == left
    torch.manual_seed(1)
    got = torch.fx.GraphModule(nn.Module(), traced.graph)(x)
    torch.manual_seed(1)
    assert torch.equal(got[0] if isinstance(got, tuple) else got, f(x))
