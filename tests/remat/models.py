"""Small plain blocks. Sizes are such that activations outweigh what is summed over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import models

DIM, HEADS, TOKENS = 32, 2, 64


def hidden(tokens: int = TOKENS) -> Tensor:
    return torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(o.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 96, bias), nn.Linear(DIM, 96, bias)
        self.down = nn.Linear(96, DIM, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two of three experts for each token, all of them computed; `megacpp::moe` serves them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(SwiGLU(bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        gates = torch.zeros(*x.shape[:-1], 3).scatter(-1, chosen, weights)
        return sum(expert(x) * gates[..., i : i + 1] for i, expert in enumerate(self.experts))


class Mixer(nn.Module):
    """What surrounds a state-space scan, and a stand-in for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 4, groups=DIM, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.inward(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        return self.outward(x.cumsum(1) * F.silu(gate))


class Layer(nn.Module):
    def __init__(self, *blocks: nn.Module, checkpointed: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second = blocks
        self.norm1, self.norm2 = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.checkpointed, self.broken = checkpointed, broken

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + (checkpoint(self.first, h, use_reentrant=False) if self.checkpointed else self.first(h))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.second(self.norm2(x))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def llama(layers: int = 2, **kwargs) -> Model:
    torch.manual_seed(0)
    dropout = kwargs.pop("dropout", 0.0)
    return Model(*(Layer(Attention(dropout), SwiGLU(), **kwargs) for _ in range(layers)))


def mla(layers: int = 2):
    """(model, inputs): heads of 24 lanes for queries and keys, 24 for values, so that CPU has a kernel for them."""
    torch.manual_seed(0)
    model = models.Stack([models.Layer(models.MLA(DIM, HEADS, 0, 16, 16, 8, 24), DIM, 96) for _ in range(layers)])
    return model, (hidden(), *models.rotary_tables(TOKENS, 8, torch.device("cpu"), torch.float32))
