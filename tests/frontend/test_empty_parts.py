"""Concatenations with an empty tensor, as a cache's first write is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frames import check
from tests.matchers.graphs import trace

aten = torch.ops.aten


class Prefill(nn.Module):
    """A normed latent that is written to an empty cache before it is projected up."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        latent = F.rms_norm(self.down(x), (4,), self.gain)
        cached = torch.cat((torch.tensor([]), latent.unsqueeze(1)), -2)
        return self.up(cached), cached, latent


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_latent_behind_an_empty_cache(dynamic):
    frames = check(Prefill(), (torch.randn(2, 3, 8),), dynamic=dynamic)
    assert frames.fired == {"down_norm_up": 1}
    _, cached, latent = frames.compiled(torch.randn(2, 3, 8))
    assert cached.untyped_storage().data_ptr() != latent.untyped_storage().data_ptr()


@pytest.mark.parametrize(("f", "left"), [
    (lambda x: torch.cat((torch.tensor([]), x.new_empty(0), x), -2).exp(), 0),
    (lambda x: torch.cat((x.new_zeros(0), x, x), -2).exp(), 1),
    (lambda x: torch.cat((x.new_empty(0, dtype=torch.float64), x), -2).exp(), 1),
    (lambda x: torch.cat((x[0, :0], x), -2).exp(), 1),
    (lambda x: torch.cat((x.new_empty(0), x), -2).mT, 1),
    (lambda x: torch.cat((x.new_empty(0), x.mT), -2).as_strided((2, 2), (1, 2)).exp(), 1),
], ids=["empty", "two more", "of a wider dtype", "of an input", "a view of it is returned", "read by strides"])  # fmt: skip
def test_what_is_concatenated_with_nothing(f, left):
    x = torch.randn(3, 4)
    traced = trace(f, x)
    assert len(traced.graph.find_nodes(op="call_function", target=aten.cat.default)) == left
    got = torch.fx.GraphModule(nn.Module(), traced.graph)(x)
    assert torch.equal(got[0] if isinstance(got, tuple) else got, f(x))
