"""What `fa4_runtime` calls of `flash_attn.cute.interface`, with that module's arguments, layouts and results."""

from __future__ import annotations

import torch

CALLS: list[str] = []


def _scores(q, k, softmax_scale, causal, softcap):
    heads = q.shape[2] // k.shape[2]
    q, k = q.double().transpose(1, 2), k.double().transpose(1, 2).repeat_interleave(heads, 1)
    scores = q @ k.transpose(-1, -2) * softmax_scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _attend(q, k, v, softmax_scale, causal, softcap):
    scores, heads = _scores(q, k, softmax_scale, causal, softcap), q.shape[2] // k.shape[2]
    out = scores.softmax(-1) @ v.double().transpose(1, 2).repeat_interleave(heads, 1)
    return out.transpose(1, 2), scores.logsumexp(-1)


def _flash_attn_fwd(q, k, v, softmax_scale=None, causal=False, softcap=None, return_lse=False):
    CALLS.append("forward")
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and return_lse and softcap != 0.0
    out, lse = _attend(q, k, v, softmax_scale, causal, softcap)
    return out.to(q.dtype), lse.float(), None, None, None


def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, deterministic=False):
    CALLS.append("backward, deterministic" if deterministic else "backward")
    assert dout.stride(-1) == 1 and out.shape == dout.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    groups = k.shape[2]
    keys, values = (t.double().transpose(1, 2).repeat_interleave(q.shape[2] // groups, 1) for t in (k, v))
    queries, grad = q.double().transpose(1, 2), dout.double().transpose(1, 2)
    scores = _scores(q, k, softmax_scale, causal, softcap)
    weights, by_weight = (scores - lse.double()[..., None]).exp(), grad @ values.mT
    by_score = weights * (by_weight - (out.double() * dout.double()).sum(-1).mT[..., None])
    if softcap:
        by_score = by_score * torch.where(weights > 0, 1 - (scores / softcap) ** 2, 0)
    by_score = by_score * softmax_scale
    found = by_score @ keys, _of_group(by_score.mT @ queries, groups), _of_group(weights.mT @ grad, groups)
    return tuple(g.transpose(1, 2).to(q.dtype) for g in found)


def _of_group(grad, groups):
    """The sum over the heads that share a key."""
    return grad.unflatten(1, (groups, -1)).sum(2)
