"""A small model of repeated layers: MLA with an MLP or with experts, an embedding before and a norm and a head behind."""

from __future__ import annotations

import torch
from torch import nn

from tests.corpus.spellings import PlainMLA

SIZES = {"heads": 2, "q_lora": 14, "kv_lora": 10, "nope": 6, "rope": 4, "v": 5}


class MLP(nn.Module):
    def __init__(self, dim, hidden=16):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.router, self.experts = nn.Linear(dim, 3), nn.ModuleList([MLP(dim, 6) for _ in range(3)])

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    """`number` is what layers of real models have beside their parameters."""

    def __init__(self, number, mlp, dim=24):
        super().__init__()
        self.number, self.layer_type = number, f"layer {number}"
        self.attention, self.mlp = PlainMLA(dim, **SIZES, table_source="buffer"), mlp

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Small(nn.Module):
    """For what is about frames, with nothing to recognise: tracing MLA takes a second."""

    def __init__(self, number, mlp):
        super().__init__()
        self.number, self.mlp = number, mlp

    def forward(self, x):
        return x + self.mlp(x)


class Numbered(Small):
    def forward(self, x):
        return super().forward(x) / (self.number + 1)


class Model(nn.Module):
    """`dense` layers with an MLP, then layers with experts."""

    def __init__(self, layers, dense=None, block=Block):
        super().__init__()
        torch.manual_seed(3)
        dense = layers if dense is None else dense
        self.embed = nn.Embedding(11, 24)
        self.layers = nn.ModuleList([block(i, MLP(24) if i < dense else Experts(24)) for i in range(layers)])
        self.norm, self.head = nn.RMSNorm(24), nn.Linear(24, 11, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def ids():
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
