"""Linear attention with one decay a head, in chunks and as one triangle, as authors write it, and what is none.

A form takes q, k [b, h, t, k], v [b, h, t, v], slopes [h], the chunk size and a state [b, h, k, v] or None; it returns o
and the last state. Decays are exp(-slope).
"""

from __future__ import annotations

import torch
from torch import nn


def zeros(q, v):
    return torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)


def blocks(q, k, v, s, size, state, late=0, key=0, seen=0):
    """Lightning attention: tables for the longest block, of which the last takes part, and results written in place."""
    n, s = q.shape[2], s.view(-1, 1, 1)
    array = torch.arange(size) + 1
    q_decay = torch.exp(-s * (array.reshape(-1, 1) + late))
    k_decay = torch.exp(-s * (size - array.reshape(-1, 1) + key))
    index = array[:, None] - array[None, :]
    diagonal = torch.exp(torch.where(index >= seen, -(s * index), float("-inf")))
    kv, out = zeros(q, v) if state is None else state, torch.empty_like(v)
    for i in range((n + size - 1) // size):
        start, end = i * size, min((i + 1) * size, n)
        m = end - start
        q_i, k_i, v_i = (x[:, :, start:end] for x in (q, k, v))
        far = torch.matmul(q_i * q_decay[:, :m], kv)
        near = torch.matmul(torch.matmul(q_i, k_i.transpose(-1, -2)) * diagonal[:, :m, :m], v_i)
        out[:, :, start:end] = far + near
        kv = torch.exp(-s * m) * kv + torch.matmul((k_i * k_decay[:, -m:]).transpose(-1, -2), v_i)
    return out, kv


def split_blocks(q, k, v, s, size, state, turn=lambda pieces: pieces, kept=1):
    """A list of results, of whole chunks that are split off."""
    position = torch.arange(size, dtype=q.dtype)
    apart = position[:, None] - position
    decay = torch.exp(-s[:, None, None] * apart).masked_fill(apart < 0, 0)
    inner, cross = torch.exp(-s[:, None] * (position + 1))[..., None], torch.exp(-s * size)[:, None, None]
    left = torch.exp(-s[:, None] * (size - 1 - position))[..., None]
    state, out = zeros(q, v) if state is None else state, []
    for q_i, k_i, v_i in zip(q.split(size, 2), turn(k.split(size, 2)), v.split(size, 2), strict=True):
        out.append((q_i @ k_i.mT * decay) @ v_i + (q_i @ state) * inner)
        state = kept * cross * state + (k_i * left).mT @ v_i
    return torch.cat(out, 2), state


def stacked_chunks(q, k, v, s, size, state):
    """All chunks at once, but for the state; powers of a decay that is made of numbers."""
    gamma = 1 - 2.0 ** (-1 - torch.arange(q.shape[1], dtype=q.dtype))
    i = torch.arange(size)
    decay = (gamma[:, None, None] ** (i[:, None] - i)) * (i[:, None] >= i)
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
    inner, left = gamma[:, None] ** (i + 1), gamma[:, None] ** (size - 1 - i)
    added = torch.einsum("bhclk,hl,bhclv->bhckv", k, left, v)
    state, entered = zeros(q[:, :, 0], v) if state is None else state, []
    for c in range(q.shape[2]):
        entered.append(state)
        state = (gamma**size)[:, None, None] * state + added[:, :, c]
    far = torch.einsum("bhclk,bhckv->bhclv", q, torch.stack(entered, 2)) * inner[None, :, None, :, None]
    return (((q @ k.mT) * decay[:, None]) @ v + far).flatten(2, 3), state


def one_triangle(q, k, v, s, size, state, power=1, diagonal=0, normalised=False):
    """The parallel form."""
    i = torch.arange(q.shape[2])
    apart = i[:, None] - i
    decay = torch.exp(-s[:, None, None] * (apart if power == 1 else apart**power))
    decay = (decay * torch.ones(len(i), len(i)).tril(diagonal)).to(q.dtype)
    if normalised:
        decay = decay / decay.sum(-1, keepdim=True)
    return (q @ k.mT * decay) @ v, None


def powers_of(base):
    """One triangle of powers."""

    def form(q, k, v, s, size, state):
        i = torch.arange(q.shape[2])
        decay = base(s)[:, None, None] ** (i[:, None] - i)
        return (q @ k.mT * decay.tril()) @ v, None

    return form


def of_distances(decays, scores=lambda q, k: (q @ k.mT) * 0.5):
    """One triangle of `decays(slopes, distances)`, with positions of rows and of columns made anew."""

    def form(q, k, v, s, size, state):
        rows, columns = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(q.shape[2]).unsqueeze(0)
        return (scores(q, k) * decays(s[:, None, None], rows - columns)) @ v, None

    return form


FORMS = {f.__name__: f for f in (blocks, split_blocks, stacked_chunks, one_triangle)}


class PlainRetention(nn.Module):
    """slopes: a buffer of slopes, or where `learned` made of a weight."""

    def __init__(self, form, *, dim=10, heads=2, k=3, v=5, chunk=4, given=False, state=False, learned=False):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.heads, self.chunk, self.given, self.state = form, heads, chunk, given, state
        self.sizes = (heads * k, heads * k, heads * v)
        self.proj, self.out = nn.Linear(dim, sum(self.sizes), bias=False), nn.Linear(heads * v, dim, bias=False)
        self.slope = nn.Parameter(torch.rand(heads)) if learned else None
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))

    def forward(self, x, state=None):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.proj(x).split(self.sizes, -1))
        slopes = self.slopes if self.slope is None else self.slope.exp()
        o, state = self.form(q * q.shape[-1] ** -0.5, k, v, slopes, self.chunk, state)
        o = self.out(o.transpose(1, 2).flatten(2).tanh())
        return (o, state) if self.state else o

    def example_inputs(self, length=12, dtype=torch.float32):
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        x = torch.randn(2, length, self.proj.in_features, generator=generator).to(dtype).requires_grad_()
        state = torch.randn(2, self.heads, *(n // self.heads for n in self.sizes[1:]), generator=generator)
        return (x, state.requires_grad_()) if self.given else (x,)
