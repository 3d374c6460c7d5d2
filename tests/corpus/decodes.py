"""Decoding steps of latent attention, as people write them: over latents that are expanded to keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, NOPE, ROPE, VALUE, LATENT, WIDTH, BATCH, CACHED = 3, 8, 4, 6, 16, 40, 2, 37


class Step(nn.Module):
    """`body(step, x, latents, ropes, position)`: x [b, t, WIDTH] of the new tokens; latents [b, CACHED, LATENT] and
    ropes [b, CACHED, ROPE] of the rows before them, or with room for them; position, how many there are before."""

    def __init__(self, body, dtype=torch.float32):
        super().__init__()
        self.body = body
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.up = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.up_k = nn.Linear(LATENT, HEADS * NOPE, bias=False)
        self.up_v = nn.Linear(LATENT, HEADS * VALUE, bias=False)
        self.w_k = nn.Parameter(torch.randn(LATENT, HEADS, NOPE) / LATENT**0.5)
        self.w_v = nn.Parameter(torch.randn(HEADS, LATENT, VALUE) / LATENT**0.5)
        self.norm = nn.RMSNorm(LATENT)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False)
        self.to(dtype).requires_grad_(False)

    def forward(self, x, latents, ropes, position):
        return self.out(self.body(self, x, latents, ropes, position))


def arguments(tokens=1, dtype=torch.float32, cached=CACHED, batch=BATCH):
    shapes = (batch, tokens, WIDTH), (batch, cached, LATENT), (batch, cached, ROPE)
    return (*(torch.randn(shape, dtype=dtype) for shape in shapes), torch.tensor([20]))


def build(body, tokens=1, dtype=torch.float32):
    return Step(body, dtype), arguments(tokens, dtype)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [..., t, ROPE], its halves rotated for `positions` [t]."""
    angle = positions[:, None] * 10.0 ** -torch.arange(ROPE // 2, device=x.device)
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def new_rows(m, x, positions):
    latent, rope = m.down(x).split([LATENT, ROPE], -1)
    return m.norm(latent), turned(rope, positions)


def queries(m, x, positions):
    """[b, h, t, NOPE + ROPE]"""
    q = m.q(x).view(*x.shape[:2], HEADS, NOPE + ROPE).transpose(1, 2)
    nope, rope = q.split([NOPE, ROPE], -1)
    return torch.cat((nope, turned(rope, positions)), -1)


def appended(m, x, latents, ropes, positions):
    latent, rope = new_rows(m, x, positions)
    return torch.cat((latents, latent), 1), torch.cat((ropes, rope), 1)


def expanded(m, latents, ropes):
    """Keys and values of all heads, [b, h, s, ..]."""
    b, s, _ = latents.shape
    k_nope, v = m.up(latents).view(b, s, HEADS, NOPE + VALUE).transpose(1, 2).split([NOPE, VALUE], -1)
    return torch.cat((k_nope, ropes.unsqueeze(1).expand(-1, HEADS, -1, -1)), -1), v


def joined(out):
    return out.transpose(1, 2).flatten(-2)


def one_projection(m, x, latents, ropes, position):
    """No mask: one token sees all rows."""
    positions = position + torch.arange(x.shape[1], device=x.device)
    k, v = expanded(m, *appended(m, x, latents, ropes, positions))
    return joined(F.scaled_dot_product_attention(queries(m, x, positions), k, v))


def two_projections(m, x, latents, ropes, position):
    """Scores of two parts, in float32; a mask of lengths."""
    positions = position + torch.arange(x.shape[1], device=x.device)
    latent, rope = new_rows(m, x, positions)
    latents, ropes = latents.index_copy(1, positions, latent), ropes.index_copy(1, positions, rope)
    k = m.up_k(latents).unflatten(-1, (HEADS, NOPE))
    v = m.up_v(latents).unflatten(-1, (HEADS, VALUE))
    q_nope, q_rope = queries(m, x, positions).transpose(1, 2).split([NOPE, ROPE], -1)
    scores = torch.einsum("bthn,bshn->bhts", q_nope, k) + torch.einsum("bthp,bsp->bhts", q_rope, ropes)
    hidden = torch.arange(latents.shape[1], device=x.device) > positions[:, None]
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = (scores.to(wide) * (NOPE + ROPE) ** -0.5).masked_fill(hidden, float("-inf"))
    return torch.einsum("bhts,bshv->bthv", scores.softmax(-1).to(x.dtype), v).flatten(-2)


def weights_by_head(m, x, latents, ropes, position):
    """Einsums with weights of three dimensions; a causal mask that is added."""
    t = x.shape[1]
    positions = position + torch.arange(t, device=x.device)
    latents, ropes = appended(m, x, latents, ropes, positions)
    k = torch.einsum("bsr,rhn->bhsn", latents, m.w_k)
    v = torch.einsum("bsr,hrv->bhsv", latents, m.w_v)
    k = torch.cat((ropes[:, None].expand(-1, HEADS, -1, -1), k), -1)
    q = queries(m, x, positions).roll(ROPE, -1)
    s = latents.shape[1]
    mask = torch.full((t, s), float("-inf"), device=x.device, dtype=x.dtype).triu(s - t + 1)
    weights = (q @ k.transpose(-1, -2) / (NOPE + ROPE) ** 0.5 + mask).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(x.shape[0], t, -1)


def by_matmul(m, x, latents, ropes, position):
    """Products of matmul with a weight by head; batch, heads and rows by broadcasting."""
    t = x.shape[1]
    positions = position + torch.arange(t, device=x.device)
    latents, ropes = appended(m, x, latents, ropes, positions)
    k = latents[:, None] @ m.w_k.permute(1, 0, 2)
    v = latents[:, None] @ m.w_v
    q_nope, q_rope = queries(m, x, positions).split([NOPE, ROPE], -1)
    scores = q_nope @ k.mT + q_rope @ ropes[:, None].mT
    s = latents.shape[1]
    seen = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
    weights = (scores * 0.25).where(seen, torch.finfo(x.dtype).min).softmax(-1)
    return joined(weights @ v)


def one_buffer(m, x, latents, ropes, position):
    """Latents and rotated rows side by side, written in place; a boolean mask of torch's attention."""
    cache = torch.cat((latents, ropes), -1).clone()
    positions = position + torch.arange(x.shape[1], device=x.device)
    cache.index_copy_(1, positions, torch.cat(new_rows(m, x, positions), -1))
    k, v = expanded(m, cache[..., :LATENT], cache[..., LATENT:])
    place = torch.arange(cache.shape[1], device=x.device)
    seen = place[None, :] <= positions[:, None]
    out = F.scaled_dot_product_attention(queries(m, x, positions), k, v, attn_mask=seen[None, None], scale=0.3)
    return joined(out)


def raw_latents(m, x, latents, ropes, position):
    """Latents from before their norm, all of them normed at each step; a mask of lengths and of what is there."""
    positions = position + torch.arange(x.shape[1], device=x.device)
    latent, rope = m.down(x).split([LATENT, ROPE], -1)
    latents = m.norm(latents.index_copy(1, positions, latent))
    ropes = ropes.index_copy(1, positions, turned(rope, positions))
    k, v = expanded(m, latents, ropes)
    place = torch.arange(latents.shape[1], device=x.device)
    seen = (place < position + x.shape[1]) & (place <= positions[:, None])
    return joined(F.scaled_dot_product_attention(queries(m, x, positions), k, v, attn_mask=seen))


def length_of_each(m, x, latents, ropes, position):
    """Every sequence has a length of its own."""
    k, v = expanded(m, latents, ropes)
    lengths = torch.cat((position, *(position - 3 for _ in range(x.shape[0] - 1))))
    seen = torch.arange(latents.shape[1], device=x.device) < lengths.view(-1, 1, 1, 1)
    return joined(F.scaled_dot_product_attention(queries(m, x, position), k, v, attn_mask=seen))


def rows_of_one_weight(m, x, latents, ropes, position):
    """The keys' rows of a weight beside the values'; rotated rows repeated in memory, once for each head."""
    positions = position + torch.arange(x.shape[1], device=x.device)
    latents, ropes = appended(m, x, latents, ropes, positions)
    k, v = (F.linear(latents, w) for w in m.up.weight.split([HEADS * NOPE, HEADS * VALUE]))
    k = torch.cat((k.unflatten(-1, (HEADS, NOPE)), ropes.unsqueeze(2).repeat(1, 1, HEADS, 1)), -1).transpose(1, 2)
    v = v.unflatten(-1, (HEADS, VALUE)).transpose(1, 2)
    return joined(F.scaled_dot_product_attention(queries(m, x, positions), k, v))


SPELLINGS = (
    one_projection, two_projections, weights_by_head, by_matmul, one_buffer, raw_latents, length_of_each,
    rows_of_one_weight,
)  # fmt: skip
