"""DeepSeek Sparse Attention as people write it: latents expanded to keys and values, and a mask of what top-k chose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.decodes import expanded, joined

HEADS, NOPE, ROPE, VALUE, LATENT, WIDTH, BATCH, TOKENS, TOPK = 3, 8, 4, 6, 16, 40, 2, 40, 4
SCALE = (NOPE + ROPE) ** -0.5


class Sparse(nn.Module):
    """`body(module, q, latent, rope, listed)`: q [b, h, t, NOPE + ROPE]; latent [b, s, LATENT]; rope [b, s, ROPE];
    listed [b, t, TOPK], the rows an indexer chose."""

    def __init__(self, body, dtype=torch.float32, topk=TOPK):
        super().__init__()
        self.body, self.topk, self.scale = body, topk, SCALE
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.up = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.norm = nn.RMSNorm(LATENT)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False)
        self.to(dtype)

    def forward(self, x, index_scores):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, rope = self.down(x).split([LATENT, ROPE], -1)
        listed = index_scores.masked_fill(~lower(x), float("-inf")).topk(self.topk, dim=-1).indices
        return self.out(self.body(self, q, self.norm(latent), rope, listed))


def arguments(tokens=TOKENS, dtype=torch.float32, batch=BATCH):
    """Of scores by which every query chooses itself, so that it sees a row whatever else a mask hides."""
    return torch.randn(batch, tokens, WIDTH, dtype=dtype), torch.randn(batch, tokens, tokens) + 9 * torch.eye(tokens)


def build(body, dtype=torch.float32, tokens=TOKENS):
    return Sparse(body, dtype), arguments(tokens, dtype)


def lower(x: Tensor) -> Tensor:
    """[t, t] of bool: the rows up to each query."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def rows(listed: Tensor, latent: Tensor) -> tuple[int, int, int]:
    return latent.shape[0], listed.shape[1], latent.shape[1]


def sdpa_by_bool(m, q, latent, rope, listed):
    """Ones of bool scattered, and a triangle."""
    k, v = expanded(m, latent, rope)
    seen = torch.zeros(rows(listed, latent), dtype=torch.bool, device=q.device).scatter(-1, listed, True) & lower(latent)
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1)))


def by_products(m, q, latent, rope, listed):
    """DeepSeek's own code: -inf where nothing is listed, written in place, and a causal mask that is added."""
    k, v = (x.transpose(1, 2) for x in expanded(m, latent, rope))
    scores = torch.einsum("bthd,bshd->bths", q.transpose(1, 2), k) * m.scale
    mask = torch.full(rows(listed, latent), float("-inf"), device=q.device).scatter_(-1, listed, 0)
    t = latent.shape[1]
    mask += torch.full((t, t), float("-inf"), device=q.device).triu_(1)
    scores += mask.unsqueeze(2)
    p = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).type_as(q)
    return torch.einsum("bths,bshd->bthd", p, v).flatten(2)


def as_transformers(m, q, latent, rope, listed):
    """Ones at what is not listed, filled over a causal mask that is added; dropouts that drop nothing."""
    k, v = (F.dropout(rows, 0.0, m.training) for rows in expanded(m, latent, rope))
    lowest = torch.finfo(q.dtype).min
    place = torch.arange(latent.shape[1], device=q.device)
    seen = place[None, None, None, :] <= place[None, None, :, None]
    mask = torch.where(seen, torch.tensor(0.0, device=q.device, dtype=q.dtype), lowest)
    hidden = listed.new_ones(rows(listed, latent), dtype=torch.bool).scatter(-1, listed.to(torch.int32).long(), False)
    mask = mask.masked_fill(hidden.unsqueeze(1), lowest)
    p = F.softmax(q @ k.transpose(2, 3) * m.scale + mask, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return joined(F.dropout(p.to(q.dtype), 0.0, m.training) @ v)


def one_hot(m, q, latent, rope, listed):
    """Vectors of each place of the list, added up; scores filled twice."""
    k, v = expanded(m, latent, rope)
    chosen = F.one_hot(listed, latent.shape[1]).sum(-2) > 0
    scores = (q @ k.mT * SCALE).masked_fill(~chosen[:, None], float("-inf"))
    scores = torch.where(lower(latent), scores, torch.finfo(q.dtype).min)
    return joined(scores.softmax(-1) @ v)


def compared(m, q, latent, rope, listed):
    """Every row's number beside the list; what is hidden, joined by or, times a low number."""
    k, v = expanded(m, latent, rope)
    place = torch.arange(latent.shape[1], device=q.device)
    hidden = (listed.unsqueeze(-1) != place).all(-2).unsqueeze(1) | (place > place[:, None])
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -1e9)
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def list_of_heads(m, q, latent, rope, listed):
    """The list expanded to heads, ones in the queries' dtype, and what is missing to them times a low number."""
    k, v = expanded(m, latent, rope)
    b, t, s = rows(listed, latent)
    every = listed.unsqueeze(1).expand(-1, HEADS, -1, -1)
    kept = torch.zeros(b, HEADS, t, s, dtype=q.dtype, device=q.device).scatter(-1, every, 1.0)
    mask = (1.0 - kept) * -1e9
    scores = q @ k.mT * SCALE + mask
    return joined(scores.masked_fill(~lower(latent), float("-inf")).softmax(-1) @ v)


def triangle_of_the_list(m, q, latent, rope, listed):
    """What is listed behind the query is cut off."""
    k, v = expanded(m, latent, rope)
    seen = torch.zeros(rows(listed, latent), dtype=torch.bool, device=q.device).scatter(-1, listed, True).tril()
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=0.3))


def written_at_places(m, q, latent, rope, listed):
    """Ones written by index; scores and their products in float32."""
    k, v = expanded(m, latent, rope)
    b, t, _ = listed.shape
    chosen = torch.zeros(rows(listed, latent), dtype=torch.bool, device=q.device)
    chosen[torch.arange(b)[:, None, None], torch.arange(t)[None, :, None], listed] = True
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT).masked_fill(~(chosen & lower(latent))[:, None], float("-inf")) * SCALE
    return joined(scores.softmax(-1) @ v.to(wide)).to(q.dtype)


def list_with_repetitions(m, q, latent, rope, listed):
    """Of which nothing says that no row is named twice, and some are."""
    return triangle_of_the_list(m, q, latent, rope, torch.cat((listed[..., :1], listed[..., :3] // 2), -1))


def packed(m, q, latent, rope, listed):
    """Documents in a row and padding, as data; no causal mask beside them."""
    k, v = expanded(m, latent, rope)
    document = (latent[..., 0] > 0).cumsum(-1) // 8
    padding = torch.arange(latent.shape[1], device=q.device) < 2
    own = (document[:, :, None] == document[:, None, :]) & ~(padding & (rope[:, None, :, 0] > 9))
    seen = torch.zeros(rows(listed, latent), dtype=torch.bool, device=q.device).scatter(-1, listed, True)
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=(seen & own)[:, None]))


def window(m, q, latent, rope, listed):
    """Rows that are listed and not too far back, by the first half of a sorted list, the same for all sequences."""
    k, v = expanded(m, latent, rope)
    place = torch.arange(latent.shape[1], device=q.device)
    listed = (place[:, None] - place).abs().argsort(-1)[:, : listed.shape[-1]]
    near = place[:, None] - place < 3
    hidden = torch.ones(latent.shape[1], latent.shape[1], device=q.device).scatter(1, listed, 0.0) != 0
    scores = (q @ k.mT * SCALE).masked_fill(hidden | ~near, float("-inf"))
    return joined(scores.softmax(-1) @ v)


SPELLINGS = (sdpa_by_bool, by_products, as_transformers, one_hot, compared, list_of_heads, triangle_of_the_list,
             written_at_places, list_with_repetitions, packed, window)  # fmt: skip
