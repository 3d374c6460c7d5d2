"""Streams of a residual that layers mix: saved after groups of layers, recomputed together between."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.remat import models
from tests.remat.steps import same, step

STREAMS, LAYERS = 4, 4
X = models.hidden()


class Mixed(nn.Module):
    """A block that reads a mix of streams and adds to all of them, which are mixed, too, token by token."""

    def __init__(self, block):
        super().__init__()
        self.block, self.norm = block, nn.RMSNorm(models.DIM, 1e-6)
        self.coefficients = nn.Linear(STREAMS * models.DIM, STREAMS * (STREAMS + 2))

    def forward(self, s):
        found = self.coefficients(F.rms_norm(s.flatten(2), (STREAMS * models.DIM,)))
        mix, read, write = found.split([STREAMS * STREAMS, STREAMS, STREAMS], -1)
        y = self.block(self.norm((read.sigmoid().unsqueeze(-2) @ s).squeeze(-2)))
        return mix.unflatten(-1, (STREAMS, STREAMS)).softmax(-1) @ s + write.unsqueeze(-1) * y.unsqueeze(-2)


class Streams(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = (models.SwiGLU() if i else models.Attention() for i in range(LAYERS))
        self.layers = nn.ModuleList(Mixed(block) for block in blocks)

    def forward(self, x):
        s = x.unsqueeze(2).repeat(1, 1, STREAMS, 1)
        for layer in self.layers:
            s = layer(s)
        return s.sum(2)


@pytest.fixture(scope="module")
def steps():
    policies = {"none": None, "bytes": "selective", "each": {"stream_group": -1}, "two": {"stream_group": 2}}
    return {name: step(Streams(), (X,), {"policy": policy}) for name, policy in policies.items()}


pytestmark = pytest.mark.xdist_group("residual streams")


def saved_streams(made):
    results = made.graphs[0].graph.output_node().args[0]
    found = [n.meta["val"] for n in results if isinstance(n, torch.fx.Node) and n.op != "placeholder"]
    return sum(isinstance(t, torch.Tensor) and t.numel() == STREAMS * X.numel() for t in found)


@pytest.mark.end_to_end
def test_streams_are_saved_after_groups_of_layers(steps):
    """Not after the last one, which nobody's backward needs."""
    assert all(same(s, steps["none"]) for s in steps.values())
    assert saved_streams(steps["each"]) == LAYERS - 1
    assert saved_streams(steps["two"]) == LAYERS // 2 - 1
    assert saved_streams(steps["bytes"]) < saved_streams(steps["each"]) < saved_streams(steps["none"])
    assert steps["two"].saved < steps["each"].saved < steps["none"].saved
    assert steps["bytes"].saved < steps["each"].saved
