"""A small model with everything a replacement has to tell apart. Sizes are multiples of 16 unless said otherwise."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

DIM, LATENT, TOKENS = 32, 16, 16


class Of(nn.Module):
    """`body(module, *args)` of a module that has `parts`."""

    def __init__(self, body, **parts):
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.body(self, *args)


class Norm(nn.Module):
    """As Hugging Face writes them."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class Attention(nn.Module):
    """Latent attention without the attention: `q_norm` feeds one linear alone, `in_norm` three."""

    def __init__(self):
        super().__init__()
        self.in_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.q_a_proj, self.q_norm = nn.Linear(DIM, LATENT, bias=False), Norm(LATENT)
        self.q_b_proj = nn.Linear(LATENT, DIM, bias=False)
        self.k_proj, self.v_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        h = self.in_norm(x)
        return self.o_proj(torch.tanh(self.q_b_proj(self.q_norm(self.q_a_proj(h))) * self.k_proj(h)) + self.v_proj(h))


class MLP(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.gate = nn.Linear(DIM, 4)  # a router; `gate_proj` is none
        self.gate_proj, self.up_proj = nn.Linear(DIM, hidden, bias=False), nn.Linear(DIM, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x):
        return self.gate(x).softmax(-1).amax(-1, keepdim=True) * self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp, self.moe_router = Attention(), MLP(), nn.Linear(DIM, 16)

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(rms_norm(x, (DIM,))) * self.moe_router(x).sum(-1, keepdim=True).sigmoid()


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.wte = nn.Embedding(64, DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.lm_head = nn.Linear(DIM, 64, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def model(te=None, layers=2, seed=0):
    torch.manual_seed(seed)
    made = Model(layers)
    for p in made.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.1)
    return made if te is None else made.to(te.device, te.dtype)


def ids(te=None, shape=(2, TOKENS)):
    drawn = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(1))
    return drawn if te is None else drawn.to(te.device)


def equal(got, want):
    """Bit by bit."""
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
