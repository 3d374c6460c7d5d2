"""The plain models that are measured, written as a user writes them: nothing here knows of any compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotary_tables(
    tokens: int, dim: int, device: torch.device, dtype: torch.dtype, base: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """cos and sin, each (tokens, dim), with both halves alike."""
    frequency = base ** (-torch.arange(0, dim, 2, device=device).double() / dim)
    angle = torch.outer(torch.arange(tokens, device=device).double(), frequency)
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def rotary_in_table_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With tables in float32 and activations in bfloat16: computed in float32, rounded once."""
    wide = x.to(cos.dtype)
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


def rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """DeepSeek's layout: pairs lie beside each other in the projection, and in halves after it."""
    return rotary(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


class Rope(nn.Module):
    """What MLA does between its projections and its attention: split, rotate, put together.

    `heads_dim`: where the heads are in what attention gets; "heads_first" transposes to it, as SDPA wants.
    """

    def __init__(self, nope: int, rope: int, v: int, style: str = "half", heads_first: bool = False) -> None:
        super().__init__()
        self.nope, self.rope, self.v, self.heads_first = nope, rope, v, heads_first
        self.rotate = {"half": rotary, "interleaved": rotary_interleaved, "wide": rotary_in_table_dtype}[style]

    def forward(self, q: Tensor, kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k_pe = k_pe.unsqueeze(-2)
        if self.heads_first:
            q, kv, k_pe = q.transpose(1, 2), kv.transpose(1, 2), k_pe.transpose(1, 2)
        else:
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        q_nope, q_pe = q.split([self.nope, self.rope], -1)
        k_nope, v = kv.split([self.nope, self.v], -1)
        q_pe, k_pe = self.rotate(q_pe, cos, sin), self.rotate(k_pe, cos, sin)
        k_pe = k_pe.expand(*k_nope.shape[:-1], self.rope)
        return torch.cat((q_nope, q_pe), -1), torch.cat((k_nope, k_pe), -1), v


def segment_sums(a: Tensor) -> Tensor:
    """[..., l] -> [..., l, l]: the sum over s + 1 .. r in row r, -inf above the diagonal."""
    n = a.shape[-1]
    ones = torch.ones(n, n, device=a.device, dtype=torch.bool)
    sums = a.unsqueeze(-1).expand(*a.shape, n).masked_fill(~ones.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~ones.tril(), float("-inf"))


class Scan(nn.Module):
    """Mamba-2's chunked scan in einsums, as its paper's listing: everything in the dtype of the steps."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        heads, groups = x.shape[2], B.shape[2]
        B, C = (t.to(dt.dtype).repeat_interleave(heads // groups, 2) for t in (B, C))
        u, B, C = (t.unflatten(1, (-1, self.chunk)) for t in (x.to(dt.dtype) * dt.unsqueeze(-1), B, C))
        a = (dt * A).unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2)
        total = a.cumsum(-1)
        inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, segment_sums(a).exp(), u)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, (total[..., -1:] - total).exp(), u)
        states = torch.cat((torch.zeros_like(states[:, :1]), states), 1)
        between = segment_sums(F.pad(total[..., -1], (1, 0))).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        entered = torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states, total.exp())
        return (inside + entered).flatten(1, 2).to(x.dtype)


class LlamaRope(nn.Module):
    """Ordinary RoPE of grouped-query attention, as in Llama."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return rotary(q, cos, sin), rotary(k, cos, sin)


class LlamaAttention(nn.Module):
    """What Llama does between its projections."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LowRank(nn.Module):
    """A projection through a latent with a norm on it."""

    def __init__(self, dim: int, latent: int, out: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, latent, bias=False)
        self.norm = RMSNorm(latent)
        self.up = nn.Linear(latent, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x)))


class MLA(nn.Module):
    """Multi-head latent attention; `q_lora` 0 projects the queries directly."""

    def __init__(self, dim: int, heads: int, q_lora: int, kv_lora: int, nope: int, rope: int, v: int) -> None:
        super().__init__()
        self.heads, self.q_lora, self.kv_lora, self.nope, self.rope, self.v = heads, q_lora, kv_lora, nope, rope, v
        if q_lora:
            self.q_a, self.q_norm = nn.Linear(dim, q_lora, bias=False), RMSNorm(q_lora)
            self.q_b = nn.Linear(q_lora, heads * (nope + rope), bias=False)
        else:
            self.q = nn.Linear(dim, heads * (nope + rope), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(dim, kv_lora + rope, bias=False), RMSNorm(kv_lora)
        self.kv_b = nn.Linear(kv_lora, heads * (nope + v), bias=False)
        self.o = nn.Linear(heads * v, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))) if self.q_lora else self.q(x)
        q = q.view(batch, tokens, self.heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_pe = q.split([self.nope, self.rope], -1)
        latent, k_pe = self.kv_a(x).split([self.kv_lora, self.rope], -1)
        kv = self.kv_b(self.kv_norm(latent)).view(batch, tokens, self.heads, self.nope + self.v).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v], -1)
        k_pe = rotary(k_pe.view(batch, 1, tokens, self.rope), cos, sin).expand(-1, self.heads, -1, -1)
        q, k = torch.cat((q_nope, rotary(q_pe, cos, sin)), -1), torch.cat((k_nope, k_pe), -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


class SparseMLA(MLA):
    """DeepSeek Sparse Attention as a mask on MLA: of the rows that an indexer scored [b, t, s], -inf behind the query,
    each query sees the best `topk`."""

    def __init__(self, topk: int, *sizes: int) -> None:
        super().__init__(*sizes)
        self.topk = topk

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        listed = scores.topk(self.topk, sorted=False).indices
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, listed, True)
        seen = seen & torch.ones(seen.shape[1:], dtype=torch.bool, device=x.device).tril()
        return super().forward(x, cos, sin, seen.unsqueeze(1))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RangeLoopMoE(nn.Module):
    """Each token's choices among the experts, weighted, and experts that all tokens share. The plainest loop: every
    expert takes its tokens and adds to them."""

    def __init__(self, dim: int, hidden: int, experts: int, choices: int, shared: int, stacked: bool = False) -> None:
        super().__init__()
        self.experts_number, self.choices = experts, choices
        self.router, self.shared = nn.Linear(dim, experts, bias=False), SwiGLU(dim, shared * hidden)
        self.experts = None if stacked else nn.ModuleList(SwiGLU(dim, hidden) for _ in range(experts))
        if stacked:
            self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, dim) / dim**0.5)
            self.down = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)

    def expert(self, number: int, x: Tensor) -> Tensor:
        if self.experts is not None:
            return self.experts[number](x)
        gate, up = F.linear(x, self.gate_up[number]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[number])

    def forward(self, x: Tensor) -> Tensor:
        gates, indices = self.router(x).float().softmax(-1).topk(self.choices, -1)
        gates = gates.to(x.dtype)
        out = torch.zeros_like(x)
        for number in range(self.experts_number):
            token, choice = torch.where(indices == number)
            out.index_add_(0, token, self.expert(number, x[token]) * gates[token, choice, None])
        return out + self.shared(x)


class Layer(nn.Module):
    def __init__(self, attention: MLA, dim: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), attention
        self.mlp_norm, self.mlp = RMSNorm(dim), SwiGLU(dim, hidden)

    def forward(self, x: Tensor, *of_attention: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *of_attention)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *of_attention: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *of_attention)
        return x


class CausalConv(nn.Module):
    """A mixer's short convolution, as models spell it: time last for `nn.Conv1d`, and back."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, taps, padding=taps - 1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


class GatedRMSNorm(nn.Module):
    """Mamba-2's: gate first, a norm for each group, statistics in float32."""

    def __init__(self, dim: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.groups, self.eps = nn.Parameter(torch.ones(dim)), groups, eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        h = y.float() * F.silu(z.float())
        h = h.unflatten(-1, (self.groups, -1))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.flatten(-2).to(y.dtype)


class MixerEnds(nn.Module):
    """A Mamba-2 mixer without its scan: what stands before and behind it, projections included."""

    def __init__(self, dim: int, inner: int, states: int, groups: int, taps: int) -> None:
        super().__init__()
        self.inner, self.mixed = inner, inner + 2 * states
        self.in_proj = nn.Linear(dim, inner + self.mixed, bias=False)
        self.conv, self.norm = CausalConv(self.mixed, taps), GatedRMSNorm(inner, groups)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z, mixed = self.in_proj(x).split([self.inner, self.mixed], -1)
        mixed = self.conv(mixed)
        y, rest = mixed.split([self.inner, self.mixed - self.inner], -1)
        return self.out_proj(self.norm(y * (1 + rest.mean(-1, keepdim=True)), z))


class Mamba2Mixer(nn.Module):
    """A Mamba-2 mixer in einsums; parameters are named as those of Hugging Face's `Mamba2Mixer`. One norm over all."""

    def __init__(self, dim: int, heads: int, p: int, n: int, groups: int, chunk: int, taps: int, eps: float) -> None:
        super().__init__()
        self.p, self.n, self.inner, self.states = p, n, heads * p, groups * n
        mixed = self.inner + 2 * self.states
        self.in_proj = nn.Linear(dim, self.inner + mixed + heads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, taps, padding=taps - 1, groups=mixed)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.zeros(heads)) for _ in range(3))
        self.norm, self.scan = GatedRMSNorm(self.inner, 1, eps), Scan(chunk)
        self.out_proj = nn.Linear(self.inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z, mixed, dt = self.in_proj(x).split([self.inner, self.inner + 2 * self.states, self.D.numel()], -1)
        mixed = F.silu(self.conv1d(mixed.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        u, B, C = mixed.split([self.inner, self.states, self.states], -1)
        u, B, C = u.unflatten(-1, (-1, self.p)), B.unflatten(-1, (-1, self.n)), C.unflatten(-1, (-1, self.n))
        dt = F.softplus(dt + self.dt_bias).float()
        y = self.scan(u, dt, -self.A_log.float().exp(), B, C) + self.D.unsqueeze(-1) * u
        return self.out_proj(self.norm(y.flatten(-2), z))


class GatheredMLA(nn.Module):
    """Top-k sparse MLA, each query's latent rows gathered first: q [b, t, h, d], kv [b, s, 1, d],
    indices [b, t, 1, k], of which -1 is none; every query has one."""

    def __init__(self, scale: float, d_v: int) -> None:
        super().__init__()
        self.scale, self.d_v = scale, d_v

    def forward(self, q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
        index, rows = indices.squeeze(2), kv.squeeze(2)
        batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
        chosen = rows[batch, index.clamp_min(0)]
        scores = torch.einsum("bthd,btkd->bthk", q, chosen).float() * self.scale
        p = scores.masked_fill((index < 0).unsqueeze(2), float("-inf")).softmax(-1).to(q.dtype)
        return torch.einsum("bthk,btkd->bthd", p, chosen[..., : self.d_v])
