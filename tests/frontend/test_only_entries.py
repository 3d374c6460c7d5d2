"""What is written over the only entry of a dimension is read in its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.matchers.graphs import trace
from tests.passes.contract import assert_autocast, assert_dynamic, assert_fires

aten = torch.ops.aten


def added(x, dim=-1, index=0):
    y = x.exp()
    y.select(dim, index).add_(1)
    return y


READ = {
    "read again": lambda x: added(x)[..., 0] * 2,
    "by another name": lambda x: added(x, 2, -1).select(-1, 0).sin(),
    "as it is": lambda x: added(x).sin(),
    "both": lambda x: added(x).sin()[..., 0] + added(x)[..., 0],
    "twice": lambda x: (added(x).mul_(2)[..., 0].add_(x[..., 0])).cos(),
}
LEFT = {
    "one of several entries": lambda x: added(x, 0).sin(),
    "an output": added,
    "what is not computed": lambda x: x.new_zeros(3, 4, 1).select_scatter(x[..., 0], -1, 0).view(12),
    "another dtype": lambda x: x.exp().select_scatter(x[..., 0].double().sin(), -1, 0).sin(),
}


def writes(f):
    """How many writes of one entry the graph of `f` has."""
    x = torch.randn(3, 4, 1)
    traced = trace(f, x)
    got = torch.fx.GraphModule(nn.Module(), traced.graph)(x)
    got = got[0] if isinstance(got, (tuple, list)) else got
    assert got.equal(f(x)) and got.dtype == f(x).dtype
    return len(traced.graph.find_nodes(op="call_function", target=aten.select_scatter.default))


@pytest.mark.parametrize("f", READ.values(), ids=list(READ))
def test_reads_what_was_written(f):
    assert writes(f) == 0


@pytest.mark.parametrize("f", LEFT.values(), ids=list(LEFT))
def test_leaves(f):
    assert writes(f) == 1


# --- experts whose biases are added in place


class Experts(nn.Module):
    """Every choice has its own copy of the weights."""

    def __init__(self, add, dim=8, hidden=12, experts=4):
        super().__init__()
        self.add, self.router = add, nn.Linear(dim, experts)
        self.up, self.up_bias = nn.Parameter(torch.randn(experts, hidden, dim)), nn.Parameter(torch.randn(experts, hidden))
        self.down, self.down_bias = nn.Parameter(torch.randn(experts, dim, hidden)), nn.Parameter(torch.randn(experts, dim))

    def forward(self, x):
        gates, indices = self.router(x).softmax(-1).topk(2)
        ids = indices.flatten()
        h = self.add(torch.bmm(self.up[ids], x.repeat_interleave(2, 0)[..., None]), self.up_bias[ids])
        h = self.add(torch.bmm(self.down[ids], nn.functional.gelu(h)[..., None]), self.down_bias[ids])
        return (h.unflatten(0, (-1, 2)) * gates[..., None]).sum(1)


def to_the_entry(product, bias):
    return product[..., 0].add_(bias)


def to_the_squeezed(product, bias):
    product = product[:, :, 0]
    product += bias
    return product


@pytest.mark.parametrize("add", [to_the_entry, to_the_squeezed], ids=lambda f: f.__name__)
def test_experts(add):
    assert_fires("moe", Experts(add).double(), (torch.randn(11, 8, dtype=torch.float64).requires_grad_(),))


def test_experts_of_any_number_of_tokens():
    assert_dynamic("moe", Experts(to_the_entry), lambda n: (torch.randn(n, 8).requires_grad_(),), everything=True)


def test_experts_under_autocast():
    assert_autocast("moe", Experts(to_the_entry), (torch.randn(200, 8).requires_grad_(),))
