"""A hybrid language model of attention (A), Mamba-2 (M), Gated DeltaNet (D) and expert (E) layers, in plain PyTorch,
without kernels.

Every layer is `x + block(norm(x))`. Attention is multi-head latent (arXiv:2405.04434), the state-space scan is the
chunked algebra of arXiv:2405.21060 in einsums, the gated delta rule that of arXiv:2412.06464 with a triangular solve,
and experts are a loop over all of them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HybridConfig:
    pattern: str = "MEMAEM"  # a letter for each layer
    vocab: int = 256  # bytes
    dim: int = 64
    # attention
    heads: int = 2
    kv_rank: int = 32
    nope_dim: int = 16  # part of a head without position
    rope_dim: int = 8  # part of a head that RoPE rotates
    v_dim: int = 16
    rope_base: float = 10000.0
    # Mamba-2
    ssm_heads: int = 4
    ssm_head_dim: int = 16
    groups: int = 2
    state: int = 16
    conv: int = 4
    chunk: int = 32
    # Gated DeltaNet; `conv` and `chunk` are its too
    key_heads: int = 2
    value_heads: int = 4
    delta_dim: int = 16  # channels of a head, of keys and of values
    # experts
    experts: int = 8
    active: int = 2
    expert_dim: int = 48
    shared_dim: int = 48


# About a billion parameters in 12 layers.
LARGE = HybridConfig(
    pattern="MEMAEMMEAMEA", dim=2048, heads=16, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, ssm_heads=64,
    ssm_head_dim=64, groups=8, state=128, chunk=256, key_heads=16, value_heads=32, delta_dim=128, experts=32, active=4,
    expert_dim=1024, shared_dim=1024,
)  # fmt: skip
TINY = HybridConfig()


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


# ------------------------------------------------------------------------------------------------------ attention


def rope_tables(length: int, dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = base ** (-torch.arange(0, dim, 2, device=like.device, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Keys and values pass through a small latent; one rotated key row serves every head."""

    def __init__(self, c: HybridConfig):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.dim, c.heads * (c.nope_dim + c.rope_dim), bias=False)
        self.kv_a_proj = nn.Linear(c.dim, c.kv_rank + c.rope_dim, bias=False)
        self.kv_a_norm = RMSNorm(c.kv_rank)
        self.kv_b_proj = nn.Linear(c.kv_rank, c.heads * (c.nope_dim + c.v_dim), bias=False)
        self.o_proj = nn.Linear(c.heads * c.v_dim, c.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        batch, length, _ = x.shape
        cos, sin = rope_tables(length, c.rope_dim, c.rope_base, x)
        q = self.q_proj(x).view(batch, length, c.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj(x).split([c.kv_rank, c.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).view(batch, length, c.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], dim=-1)
        k_rope = rotate(k_rope.view(batch, 1, length, c.rope_dim), cos, sin).expand(-1, c.heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


# -------------------------------------------------------------------------------------------------------- Mamba-2


def segment_sums(x: Tensor) -> Tensor:
    """Sums of x over (j, i] for every i >= j, -inf above the diagonal."""
    length = x.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
    x = x[..., None].expand(*x.shape, length).masked_fill(~ones.tril(-1), 0)
    return x.cumsum(-2).masked_fill(~ones.tril(), float("-inf"))


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int) -> Tensor:
    """x (batch, length, heads, channels), dt (batch, length, heads), A (heads,), B and C (batch, length, heads, state);
    the length is a multiple of the chunk."""
    batch, length, heads, _ = x.shape
    decay = (A * dt).view(batch, -1, chunk, heads).permute(0, 3, 1, 2)
    x, B, C = (t.reshape(batch, -1, chunk, heads, t.shape[-1]) for t in (x * dt[..., None], B, C))
    total = decay.cumsum(-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, segment_sums(decay).exp(), x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, (total[..., -1:] - total).exp(), x)
    states = torch.cat((torch.zeros_like(states[:, :1]), states), dim=1)
    between = segment_sums(F.pad(total[..., -1], (1, 0))).exp()
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    across = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, total.exp())
    return (within + across).reshape(batch, length, heads, -1)


class Mamba(nn.Module):
    def __init__(self, c: HybridConfig):
        super().__init__()
        self.c = c
        self.inner = c.ssm_heads * c.ssm_head_dim
        self.mixed = self.inner + 2 * c.groups * c.state
        self.in_proj = nn.Linear(c.dim, self.inner + self.mixed + c.ssm_heads, bias=False)
        self.conv = nn.Conv1d(self.mixed, self.mixed, c.conv, groups=self.mixed, padding=c.conv - 1)
        self.dt_bias = nn.Parameter(torch.linspace(-6.0, -2.0, c.ssm_heads))
        self.A_log = nn.Parameter(torch.linspace(1.0, 16.0, c.ssm_heads).log())
        self.D = nn.Parameter(torch.ones(c.ssm_heads))
        self.norm = RMSNorm(self.inner)
        self.out_proj = nn.Linear(self.inner, c.dim, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        c = self.c
        batch, length, _ = u.shape
        z, xBC, dt = self.in_proj(u).split([self.inner, self.mixed, c.ssm_heads], dim=-1)
        xBC = F.silu(self.conv(xBC.transpose(1, 2))[..., :length].transpose(1, 2))
        x, B, C = xBC.split([self.inner, c.groups * c.state, c.groups * c.state], dim=-1)
        x = x.reshape(batch, length, c.ssm_heads, c.ssm_head_dim).float()
        B, C = (
            t.reshape(batch, length, c.groups, c.state).repeat_interleave(c.ssm_heads // c.groups, dim=2).float()
            for t in (B, C)
        )
        dt = F.softplus(dt.float() + self.dt_bias.float())
        y = scan(x, dt, -self.A_log.float().exp(), B, C, c.chunk) + self.D.float()[:, None] * x
        y = y.reshape(batch, length, self.inner).to(u.dtype)
        return self.out_proj(self.norm(y * F.silu(z)))


# ------------------------------------------------------------------------------------------------- Gated DeltaNet


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """q and k (batch, length, heads, channels), v (batch, length, heads, values), g, the logarithm of the decay, and
    beta (batch, length, heads); the length is a multiple of the chunk."""
    q, k, v, g, beta = (t.unflatten(1, (-1, chunk)).movedim(3, 1) for t in (q, k, v, g[..., None], beta[..., None]))
    total = g.squeeze(-1).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    lower = ((beta * k) @ k.mT * decay).tril(-1)
    written = torch.cat((beta * v, beta * total[..., None].exp() * k), dim=-1)
    one = torch.eye(chunk, dtype=v.dtype, device=v.device)
    written = torch.linalg.solve_triangular(lower + one, written, upper=False)
    values, keys = written.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.mT * decay
    left = (total[..., -1:] - total)[..., None].exp() * k
    state, out = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), []
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        out.append(total[:, :, i, :, None].exp() * q[:, :, i] @ state + scores[:, :, i] @ new)
        state = total[:, :, i, -1, None, None].exp() * state + left[:, :, i].mT @ new
    return torch.cat(out, dim=2).transpose(1, 2)


class DeltaNet(nn.Module):
    def __init__(self, c: HybridConfig):
        super().__init__()
        self.c = c
        self.keys, self.values = c.key_heads * c.delta_dim, c.value_heads * c.delta_dim
        mixed = 2 * self.keys + self.values
        self.in_proj = nn.Linear(c.dim, mixed + self.values, bias=False)
        self.gates = nn.Linear(c.dim, 2 * c.value_heads, bias=False)
        self.conv = nn.Conv1d(mixed, mixed, c.conv, groups=mixed, padding=c.conv - 1, bias=False)
        self.dt_bias = nn.Parameter(torch.linspace(-6.0, -2.0, c.value_heads))
        self.A_log = nn.Parameter(torch.linspace(1.0, 16.0, c.value_heads).log())
        self.norm = RMSNorm(c.delta_dim)
        self.out_proj = nn.Linear(self.values, c.dim, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        c = self.c
        batch, length, _ = u.shape
        mixed, z = self.in_proj(u).split([2 * self.keys + self.values, self.values], dim=-1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        q, k, v = mixed.split([self.keys, self.keys, self.values], dim=-1)
        q, k, v = (t.reshape(batch, length, -1, c.delta_dim).float() for t in (q, k, v))
        q, k = (
            F.normalize(t, dim=-1, eps=1e-6).repeat_interleave(c.value_heads // c.key_heads, dim=2) for t in (q, k)
        )
        step, beta = self.gates(u).float().chunk(2, dim=-1)
        g = -self.A_log.float().exp() * F.softplus(step + self.dt_bias.float())
        o = delta_rule(q * c.delta_dim**-0.5, k, v, g, beta.sigmoid(), c.chunk).to(u.dtype)
        o = self.norm(o) * F.silu(z.view_as(o))
        return self.out_proj(o.reshape(batch, length, -1))


# -------------------------------------------------------------------------------------------------------- experts


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, c: HybridConfig):
        super().__init__()
        self.active = c.active
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(c.dim, c.expert_dim) for _ in range(c.experts))
        self.shared = SwiGLU(c.dim, c.shared_dim)

    def routed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Experts chosen for each token, and their gates, both (tokens, active)."""
        gates, chosen = F.softmax(self.router(tokens).float(), dim=-1).topk(self.active, dim=-1)
        return chosen, (gates / gates.sum(-1, keepdim=True)).to(tokens.dtype)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, gates = self.routed(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(tokens[token]) * gates[token, slot, None])
        return (out + self.shared(tokens)).view_as(x)


class Layer(nn.Module):
    def __init__(self, c: HybridConfig, kind: str):
        super().__init__()
        self.norm = RMSNorm(c.dim)
        self.block = {"A": Attention, "M": Mamba, "D": DeltaNet, "E": Experts}[kind](c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))


class HybridLM(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocab)."""

    def __init__(self, c: HybridConfig):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.pattern)
        self.norm = RMSNorm(c.dim)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)
