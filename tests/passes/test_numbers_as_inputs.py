"""Under `dynamic=True` the model's floats are inputs of its graph, which no recogniser may take for tensors; and a
recogniser that fails all the same costs its own pass alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacpp_compile.config.options import Config
from megacpp_compile.passes import moe
from tests.corpus.spellings import PlainMLA
from tests.frames import check, run

from .experts import DIM, Expert, MoE, where_index_add


class Multipliers(nn.Module):
    """Every branch scaled by a number of its own, as Falcon-H1 and Granite have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.experts = PlainMLA(), MoE(where_index_add, experts=2)
        width = self.attention.example_inputs()[0].shape[-1]
        self.norm, self.into, self.out = nn.RMSNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.numbers = [0.3, 1.7, 0.9, 1.1]

    def forward(self, x, *tables):
        a, b, c, d = self.numbers
        h = self.attention(x * a, *tables) * b + x
        rows = self.into(self.norm(h) * c).flatten(0, 1)
        rows = F.silu(rows * a) * d + self.experts(rows * b) * c
        return h + self.out(rows).view(x.shape) * d


def assert_experts_found(module, args, count=1):
    frames = check(module, args, dynamic=True)
    assert frames.counts["moe"] == count, frames.misses
    return frames


def hidden():
    torch.manual_seed(0)
    return (torch.randn(2, 6, DIM, requires_grad=True),)


@pytest.mark.end_to_end
def test_floats_of_the_model():
    module = Multipliers()
    frames = assert_experts_found(module, module.attention.example_inputs())
    assert frames.counts["mla_rope_q"] == 1, frames.misses


def test_floats_of_an_activation():
    """The limit and the slope of gpt_oss's experts."""

    class Clamped(Expert):
        def __init__(self):
            super().__init__(self.of_gate, of_up=lambda h: h.clamp(-self.limit, self.limit) + 1)
            self.limit, self.slope = 0.7, 1.702

        def of_gate(self, h):
            h = h.clamp(max=self.limit)
            return h * torch.sigmoid(h * self.slope)

    assert_experts_found(Layers(MoE(where_index_add, Clamped, experts=2)), hidden())


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x.flatten(0, 1)).view(x.shape)
        return x


def bounded(h, limit=0.7):
    return h.clamp(-limit, limit)


def limited(m, x, indices, gates):
    gate, up = bounded(torch.einsum("tkhd,td->tkh", m.gate_up[indices], x)).chunk(2, -1)
    out = torch.einsum("tkdh,tkh->tkd", m.down[indices], F.silu(gate) * up)
    return torch.einsum("tkd,tk->td", out, gates)


def test_a_float_that_layers_share():
    """A limit that is a function's default is one input, whichever layer calls it."""
    assert_experts_found(Layers(*(MoE(limited, stacked=True) for _ in range(2))), hidden(), 2)


@pytest.mark.parametrize("strict", [False, True])
def test_a_pass_that_fails(monkeypatch, strict):
    def find(view):
        raise AttributeError("no dim")
        yield

    monkeypatch.setattr(moe, "find", find)
    block = PlainMLA()
    if strict:
        with pytest.raises(Exception, match="no dim"):
            run(block, block.example_inputs())
        return
    frames = check(block, block.example_inputs(), Config())
    assert frames.counts["down_norm_up"] == 2 and not frames.counts["moe"]
    assert [m.reason for m in frames.misses if m.tag == "internal-error"] == ["AttributeError: no dim"]
