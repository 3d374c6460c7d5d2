"""The delta rule, token after token: what a reference, a decoding step, or code that nobody tuned does."""

from __future__ import annotations

import torch

from .parts import expanded, repeated, zeros_for


def sums_of_products(q, k, v, g, beta, state, size, scale, norm):
    """Heads first, in float32, into zeros."""
    dtype = v.dtype
    q, k = norm(repeated(q, v.shape[2])), norm(repeated(k, v.shape[2]))
    q, k, v, beta, g = (x.transpose(1, 2).contiguous().to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v, beta, g))
    q = q * scale
    out = torch.zeros_like(v)
    state = zeros_for(k, v) if state is None else state.to(v)
    for i in range(v.shape[2]):
        decay, weight = g[:, :, i].exp()[..., None, None], beta[:, :, i].unsqueeze(-1)
        state = state * decay
        known = (state * k[:, :, i].unsqueeze(-1)).sum(dim=-2)
        delta = (v[:, :, i] - known) * weight
        state = state + k[:, :, i].unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, :, i] = (state * q[:, :, i].unsqueeze(-1)).sum(dim=-2)
    return out.transpose(1, 2).contiguous().to(dtype), state


def einsums(q, k, v, g, beta, state, size, scale, norm):
    """Operands unbound along the tokens, results stacked; a gate a channel or a head."""
    q, k = expanded(norm(q) * scale, v.shape[2]), expanded(norm(k), v.shape[2])
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=v.dtype, device=v.device) if state is None else state
    decays = (g if g.dim() == 4 else g[..., None]).exp()
    out = []
    for q_t, k_t, v_t, decay, weight in zip(*(x.unbind(1) for x in (q, k, v, decays, beta)), strict=True):
        state = state * decay[..., None]
        delta = weight[..., None] * (v_t - torch.einsum("bhkv,bhk->bhv", state, k_t))
        state = state + torch.einsum("bhk,bhv->bhkv", k_t, delta)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q_t))
    return torch.stack(out, 1), state


def turned_by_rank_one(q, k, v, g, beta, state, size, scale, norm):
    """The state [V, K], as the papers write it: S (alpha (I - beta k k^T)) + beta v k^T."""
    q, k = repeated(norm(q), v.shape[2]), repeated(norm(k), v.shape[2])
    b, t, h, width = k.shape
    unit = torch.eye(width, dtype=k.dtype, device=k.device)
    state = torch.zeros(b, h, v.shape[-1], width, dtype=k.dtype, device=k.device) if state is None else state.mT
    out = []
    for i in range(t):
        key, weight = k[:, i, :, :, None], beta[:, i, :, None, None]
        turn = g[:, i, :, None, None].exp() * (unit - weight * key @ key.mT)
        state = state @ turn + weight * v[:, i, :, :, None] @ key.mT
        out.append((state @ q[:, i, :, :, None] * scale)[..., 0])
    return torch.stack(out, dim=1), state.mT


def no_gate(q, k, v, g, beta, state, size, scale, norm):
    """DeltaNet, by batched products."""
    q, k = (repeated(norm(x), v.shape[2]).transpose(1, 2) for x in (q, k))
    v, beta = v.transpose(1, 2), beta.transpose(1, 2)
    state = zeros_for(k, v) if state is None else state
    out = []
    for i in range(k.shape[2]):
        key = k[:, :, i : i + 1]
        new = beta[:, :, i : i + 1, None] * (v[:, :, i : i + 1] - key @ state)
        state = state + key.transpose(-1, -2) @ new
        out.append(q[:, :, i : i + 1] * scale @ state)
    return torch.cat(out, 2).transpose(1, 2), state
