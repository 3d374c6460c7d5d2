"""Linear attentions with no delta and no step: S <- diag(exp g) S + k v^T; o = scale * S^T q.

A form's `beta` is unused. g: [b, t, hv] or [b, t, hv, K]; where the name has `rate`, [hv], one number for each head that
no token changes (RetNet, arXiv:2307.08621; lightning attention, arXiv:2401.04658).
"""

from __future__ import annotations

import torch

from .parts import causal, chunked, expanded, padded, repeated, zeros_for


def decays_in_one_triangle(q, k, v, g, beta, state, size, scale, norm):
    """A gate a head and token, one quadratic form over the sequence (simple GLA, Mamba-2's kin)."""
    q, k = repeated(norm(q), v.shape[2]), repeated(norm(k), v.shape[2])
    total = g.cumsum(1)
    decay = (total[:, :, None] - total[:, None]).masked_fill(~causal(v.shape[1], k)[None, :, :, None], -torch.inf).exp()
    out = torch.einsum("btsh,bshv->bthv", torch.einsum("bthk,bshk->btsh", q, k) * decay, v)
    kept = (total[:, -1:] - total).exp()
    final = torch.einsum("bth,bthk,bthv->bhkv", kept, k, v)
    if state is not None:
        out = out + torch.einsum("bthk,bhkv,bth->bthv", q, state, total.exp())
        final = final + total[:, -1].exp()[..., None, None] * state
    return out * scale, final


def head_gates_in_chunks(q, k, v, g, beta, state, size, scale, norm):
    """A gate a head and token; padded, heads first, a state between chunks, results into zeros."""
    length = v.shape[1]
    q, k = (repeated(norm(x), v.shape[2]) for x in (q, k))
    behind = -length % size
    q, k, v, g = (chunked(padded(x.transpose(1, 2), behind), size) for x in (q * scale, k, v, g))
    total = g.cumsum(-1)
    decay = (total[..., None] - total[..., None, :]).tril().exp().tril()
    state = zeros_for(k, v) if state is None else state
    out = torch.zeros_like(v)
    for i in range(v.shape[2]):
        here, last = total[:, :, i], total[:, :, i, -1:]
        within = (q[:, :, i] @ k[:, :, i].transpose(-1, -2) * decay[:, :, i]) @ v[:, :, i]
        out[:, :, i] = within + (q[:, :, i] * here.exp()[..., None]) @ state
        added = (k[:, :, i] * (last - here).exp()[..., None]).transpose(-1, -2) @ v[:, :, i]
        state = state * last.exp()[..., None] + added
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), state


def head_gates_states_written(q, k, v, g, beta, state, size, scale, norm):
    """Simple GLA: states are written, one out of the one before, into zeros, and read all at once."""
    q, k = repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])
    q, k, v = (chunked(x.transpose(1, 2), size) for x in (q, k, v))
    total = chunked(g.transpose(1, 2), size).cumsum(-1)
    added = k.mT @ (v * (total[..., -1:] - total).exp()[..., None])
    entering = torch.zeros_like(added)
    for i in range(1, total.shape[2]):
        kept = entering[:, :, i - 1].clone() * total[:, :, i - 1, -1, None, None].exp()
        entering[:, :, i] = kept + added[:, :, i - 1]
    decay = (total[..., None] - total[..., None, :]).exp().masked_fill(~causal(size, v), 0)
    out = (q @ k.mT * decay) @ v + (q * total[..., None].exp()) @ entering
    return out.flatten(2, 3).transpose(1, 2), None


def channel_gates_in_chunks(q, k, v, g, beta, state, size, scale, norm):
    """GLA (arXiv:2312.06635): a gate a channel; decays within a chunk as differences, five dimensions at once."""
    b, t, h, width = v.shape
    q, k = (expanded(norm(x), h).unflatten(1, (-1, size)) for x in (q, k))
    v, total = v.unflatten(1, (-1, size)), g.unflatten(1, (-1, size)).cumsum(2)
    state = torch.zeros(b, h, k.shape[-1], width, dtype=v.dtype, device=v.device) if state is None else state
    out = []
    for q_c, k_c, v_c, here in zip(*(x.unbind(1) for x in (q, k, v, total)), strict=True):
        apart = (here[:, :, None] - here[:, None]).masked_fill(~causal(size, k)[None, :, :, None, None], -torch.inf)
        scores = torch.einsum("bthk,bshk,btshk->bhts", q_c, k_c, apart.exp())
        o = torch.einsum("bhts,bshv->bthv", scores, v_c)
        out.append(o + torch.einsum("bthk,bhkv->bthv", q_c * here.exp(), state))
        kept = k_c * (here[:, -1:] - here).exp()
        state = here[:, -1, :, :, None].exp() * state + torch.einsum("bthk,bthv->bhkv", kept, v_c)
    return torch.cat(out, 1) * scale, state


def channel_gates_in_the_operands(q, k, v, g, beta, state, size, scale, norm):
    """GLA with the decays in queries and keys."""
    q, k = (repeated(norm(x), v.shape[2]) for x in (q, k))
    q, k, v, g = (chunked(x.transpose(1, 2), size) for x in (q, k, v, g))
    total = g.cumsum(-2)
    asked, met = q * total.exp() * scale, k * (-total).exp()
    within = (asked @ met.mT).masked_fill(~causal(size, k), 0) @ v
    added = (k * (total[..., -1:, :] - total).exp()).mT @ v
    state = zeros_for(k, v) if state is None else state
    entered = []
    for i in range(v.shape[2]):
        entered.append(state)
        state = state * total[:, :, i, -1, :, None].exp() + added[:, :, i]
    out = within + asked @ torch.stack(entered, 2)
    return out.flatten(2, 3).transpose(1, 2), state


def rate_parallel(q, k, v, g, beta, state, size, scale, norm):
    """RetNet's parallel form: powers of each head's rate, by how far apart two tokens are."""
    q, k, v = (x.transpose(1, 2) for x in (expanded(norm(q), v.shape[2]), expanded(norm(k), v.shape[2]), v))
    place = torch.arange(v.shape[2], device=v.device)
    apart = (place[:, None] - place[None]).to(v.dtype)
    decay = torch.exp(g[:, None, None] * apart.clamp(min=0)) * (apart >= 0)
    out = ((q @ k.mT) * scale * decay) @ v
    left = torch.exp(g[:, None] * (v.shape[2] - 1 - place))
    final = (k * left[..., None]).mT @ v
    if state is not None:
        out = out + scale * (q * torch.exp(g[:, None] * (place + 1))[..., None]) @ state
        final = final + torch.exp(g * v.shape[2])[:, None, None] * state
    return out.transpose(1, 2), final


def rate_in_blocks(q, k, v, g, beta, state, size, scale, norm):
    """Lightning attention: blocks of tokens, three tables of decays made once."""
    b, t, h, _ = v.shape
    q, k, v = (x.transpose(1, 2) for x in (repeated(norm(q), h) * scale, repeated(norm(k), h), v))
    place = torch.arange(size, dtype=v.dtype, device=v.device) + 1
    entered, left = torch.exp(g[:, None, None] * place[:, None]), torch.exp(g[:, None, None] * (size - place[:, None]))
    apart = g[:, None, None] * (place[:, None] - place[None])
    diagonal = torch.exp(torch.where(causal(size, k), apart, float("-inf")))
    state = zeros_for(k, v) if state is None else state
    out = []
    for i in range((t + size - 1) // size):
        start, end = i * size, min((i + 1) * size, t)
        n = end - start
        q_c, k_c, v_c = (x[:, :, start:end] for x in (q, k, v))
        within = (q_c @ k_c.transpose(-1, -2) * diagonal[:, :n, :n]) @ v_c
        out.append(within + (q_c * entered[:, :n]) @ state)
        state = torch.exp(g[:, None, None] * n) * state + (k_c * left[:, size - n :]).transpose(-1, -2) @ v_c
    return torch.cat(out, -2).transpose(1, 2), state


def by_token(q, k, v, g, beta, state, size, scale, norm):
    """A gate a head or a channel, token after token, results stacked."""
    q, k = repeated(norm(q), v.shape[2]) * scale, repeated(norm(k), v.shape[2])
    decays = (g if g.dim() == 4 else g[..., None]).exp()
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=v.dtype, device=v.device) if state is None else state
    out = []
    for i in range(v.shape[1]):
        state = state * decays[:, i, :, :, None] + k[:, i, :, :, None] * v[:, i, :, None, :]
        out.append((q[:, i, :, :, None] * state).sum(-2))
    return torch.stack(out, 1), state


def products_in_front(q, k, v, g, beta, state, size, scale, norm):
    """Products of keys and values, and decays that are as large, of all tokens in front of the loop."""
    q, k = repeated(norm(q), v.shape[2]), repeated(norm(k), v.shape[2])
    added = torch.einsum("blhk,blhv->blhkv", k, v)
    decays = (g if g.dim() == 4 else g[..., None]).exp()[..., None].expand_as(added)
    state, out = zeros_for(k.transpose(1, 2), v.transpose(1, 2)) if state is None else state, []
    for i in range(v.shape[1]):
        state = state * decays[:, i] + added[:, i]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]) * scale)
    return torch.stack(out, 1), state


def rate_by_token(q, k, v, g, beta, state, size, scale, norm):
    """RetNet's recurrent form, by products and into zeros."""
    q, k, v = (x.transpose(1, 2) for x in (expanded(norm(q), v.shape[2]), expanded(norm(k), v.shape[2]), v))
    state, kept, out = zeros_for(k, v) if state is None else state, g.exp()[:, None, None], torch.zeros_like(v)
    for i in range(v.shape[2]):
        state = kept * state + k[:, :, i, :, None] @ v[:, :, i, None, :]
        out[:, :, i] = (q[:, :, i, None, :] @ state)[:, :, 0] * scale
    return out.transpose(1, 2), state
