"""A plain model of latent attention to decode with: as one forward over all tokens, and by a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp_compile.decode.absorbed import latent_attention

HEADS, NOPE, ROPE, VALUE, LATENT, WIDTH = 3, 8, 4, 6, 16, 24


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [..., n, ROPE] rotated in halves for positions [n]."""
    frequency = 10.0 ** -torch.arange(ROPE // 2, dtype=torch.float64)
    angle = positions.double()[:, None] * frequency
    cos, sin = (f(angle).to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False, dtype=dtype)
        self.down = nn.Linear(WIDTH, LATENT + ROPE, bias=False, dtype=dtype)
        self.up = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False, dtype=dtype)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False, dtype=dtype)

    def queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """([b, n, H, NOPE], [b, n, H, ROPE])."""
        nope, rope = self.q(x).unflatten(-1, (HEADS, NOPE + ROPE)).split([NOPE, ROPE], -1)
        return nope, turned(rope.transpose(1, 2), positions).transpose(1, 2)

    def latents(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """([b, n, LATENT], [b, n, 1, ROPE])."""
        latent, rope = self.down(x).split([LATENT, ROPE], -1)
        return F.rms_norm(latent, (LATENT,)), turned(rope, positions).unsqueeze(2)

    def expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, seen: Tensor) -> Tensor:
        """[b, n, H, VALUE] with keys and values of all heads; `seen` [n, rows] of bool."""
        kv = self.up(latent).unflatten(-1, (HEADS, NOPE + VALUE))
        keys = torch.cat((kv[..., :NOPE], rope.expand(-1, -1, HEADS, -1)), -1)
        scores = torch.einsum("bnhd,bthd->bhnt", torch.cat((q_nope, q_rope), -1), keys) * (NOPE + ROPE) ** -0.5
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("bhnt,bthd->bnhd", p, kv[..., NOPE:])

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        seen = positions <= positions[:, None]
        return self.out(self.expanded(*self.queries(x, positions), *self.latents(x, positions), seen).flatten(-2))


class Layers(nn.Module):
    def __init__(self, layers: int = 2, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(dtype) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def step(self, cache, x: Tensor, form: str = "plain") -> Tensor:
        """The next tokens [b, n, WIDTH]: by the rows of the cache expanded here, or by `latent_attention`."""
        positions = cache.cache_seqlens[0] + torch.arange(x.shape[1])
        seen = torch.arange(cache.capacity) <= positions[:, None]
        for i, block in enumerate(self.blocks):
            rows = cache.update(i, *block.latents(x, positions))
            q_nope, q_rope = block.queries(x, positions)
            if form == "plain":
                found = block.expanded(q_nope, q_rope, rows.latent, rows.rope, seen)
            else:
                found = latent_attention(q_nope, q_rope, rows, block.up.weight, form=form)
            x = x + block.out(found.flatten(-2))
        cache.advance(x.shape[1])
        return x
