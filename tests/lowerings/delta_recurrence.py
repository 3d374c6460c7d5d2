"""The delta rule and linear attention by their definitions, one token after the other, in the dtype they are given."""

from __future__ import annotations

import torch


def normalised(x, eps):
    return x if eps is None else x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def sequences_of(v, cu_seqlens):
    """(row, first token, end) of every sequence."""
    b, t = v.shape[:2]
    if cu_seqlens is None:
        return [(row, 0, t) for row in range(b)]
    ends = cu_seqlens.tolist()
    return [(0, start, end) for start, end in zip(ends, ends[1:], strict=False)]


def walk(q, k, v, g, initial_state, cu_seqlens, scale, written):
    """(o, final state). written(row, token, lacking): what is added to the state for a key, [hv, v]; `lacking` is the
    value less what the state has for it."""
    shared = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    o, finals = [], []
    for n, (row, start, end) in enumerate(sequences_of(v, cu_seqlens)):
        state = v.new_zeros(v.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state[n]
        rows = [v[row, :0]]
        for i in range(start, end):
            if g is not None:
                state = state * (g[row, i].exp()[..., None, None] if g.dim() == 3 else g[row, i].exp()[..., None])
            lacking = v[row, i] - torch.einsum("hkv,hk->hv", state, k[row, i])
            state = state + torch.einsum("hk,hv->hkv", k[row, i], written(row, i, lacking))
            rows.append(scale * torch.einsum("hkv,hk->hv", state, q[row, i]).unsqueeze(0))
        o.append(torch.cat(rows))
        finals.append(state)
    o = torch.stack(o) if cu_seqlens is None and o else torch.cat([v[0, :0], *o]).unsqueeze(0) if len(v) else v
    return o, torch.stack(finals) if finals else v.new_zeros(0, v.shape[2], q.shape[3], v.shape[3])


def delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_norm_eps, *_):
    def written(row, i, lacking):
        return lacking if beta is None else beta[row, i, :, None] * lacking

    q, k = (normalised(x, qk_norm_eps) for x in (q, k))
    return walk(q, k, v, g, initial_state, cu_seqlens, scale, written)


def linear_attention(q, k, v, g, initial_state, cu_seqlens, scale, *_):
    return walk(q, k, v, g, initial_state, cu_seqlens, scale, lambda row, i, lacking: v[row, i])
