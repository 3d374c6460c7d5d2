"""Loops over tokens that hand on more than a state: the sum of keys that linear attention is divided by, and mLSTM's, with
its running maximum of gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .block import Spelling
from .parts import heads_of, no_norm


def divided(q, k, v, g, beta, state, size, scale, norm):
    """Linear attention with a feature map (arXiv:2006.16236)."""
    q, k = (F.elu(x) + 1 for x in heads_of(q, k, v, scale, norm))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    total, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1]), []
    for i in range(v.shape[1]):
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], v[:, i])
        total = total + k[:, i]
        read = torch.einsum("bhk,bhkv->bhv", q[:, i], state)
        out.append(read / ((q[:, i] * total).sum(-1, keepdim=True) + 1e-4))
    return torch.stack(out, 1), state


def divided_from_none(q, k, v, g, beta, state, size, scale, norm):
    """With a decay of both, from the number 0."""
    q, k = (F.softplus(x) for x in heads_of(q, k, v, scale, norm))
    decays, state, total, out = g.exp(), 0, 0, []
    for i in range(v.shape[1]):
        state = decays[:, i, :, None, None] * state + k[:, i, ..., None] * v[:, i, ..., None, :]
        total = decays[:, i, :, None] * total + k[:, i]
        over = (q[:, i] * total).sum(-1).clamp(min=1e-3)
        out.append((q[:, i, ..., None] * state).sum(-2) / over[..., None])
    return torch.stack(out, 1), state


def running_maximum(q, k, v, g, beta, state, size, scale, norm):
    """mLSTM (arXiv:2405.04517): gates are exponentials, kept in range by their running maximum."""
    q, k = heads_of(q, k, v, scale, norm)
    b, t, h, width = v.shape
    state, total, most = v.new_zeros(b, h, k.shape[-1], width), v.new_zeros(b, h, k.shape[-1]), v.new_zeros(b, h)
    inward, out = torch.log(g.exp() + 0.5), []
    for i in range(t):
        largest = torch.maximum(g[:, i] + most, inward[:, i])
        kept, taken = torch.exp(g[:, i] + most - largest), torch.exp(inward[:, i] - largest)
        state = kept[..., None, None] * state + taken[..., None, None] * (k[:, i, ..., None] @ v[:, i, :, None])
        total, most = kept[..., None] * total + taken[..., None] * k[:, i], largest
        over = torch.maximum((q[:, i] * total).sum(-1).abs(), torch.exp(-largest))
        out.append((q[:, i, :, None] @ state).squeeze(-2) / over[..., None])
    return torch.stack(out, 1), state


def with_mean_keys(mix):
    """Keys that are a running mean, made by `mix` of that before, a token's key and the state."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k = heads_of(q, k, v, scale, norm)
        state, mean, out = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), torch.zeros_like(k[:, 0]), []
        for i in range(v.shape[1]):
            mean = mix(mean, k[:, i], state)
            written = torch.einsum("bhk,bhv->bhkv", mean, v[:, i])
            state = g[:, i].exp()[..., None, None] * state + written
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, i], state))
        return torch.stack(out, 1), state

    return Spelling(form, delta=False, norm=no_norm)


def half(mean, k, state):
    return 0.5 * mean + 0.5 * k


NORMALISERS = {
    **{f.__name__: Spelling(f, delta=False, norm=no_norm) for f in (divided, divided_from_none, running_maximum)},
    "mean_keys": with_mean_keys(half),
}
# What is handed on is made of the state, so that no op of all tokens has it.
MADE_OF_THE_STATE = with_mean_keys(lambda mean, k, state: 0.5 * mean + k * state.sum(-1).tanh())
