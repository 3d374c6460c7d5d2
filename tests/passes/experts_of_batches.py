"""Routed experts where tokens have two dimensions, [B, S], as they are or in one, and what looks like them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .experts import CHOICES, DIM, EXPERTS


def where_of_three(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        b, s, k = torch.where(indices == e)
        y[b, s] += expert(x[b, s]) * gates[b, s, k, None]
    return y


def scaled_rows_of_three(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        b, s, k = torch.where(indices == e)
        y = y.index_put((b, s), expert(x[b, s] * gates[b, s, k, None]), accumulate=True)
    return y


def mask_in_both_shapes(m, x, indices, gates):
    """As makeMoE and nanoMoE have it, but for their branch."""
    combine = torch.full_like(m.router(x), float("-inf")).scatter(-1, indices, gates).softmax(-1)
    rows, columns = x.view(-1, DIM), combine.view(-1, EXPERTS)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (indices == e).any(dim=-1)
        flat = mask.view(-1)
        y[mask] += expert(rows[flat]) * columns[flat, e].unsqueeze(1)
    return y


def one_hots_in_one_shape(m, x, indices, gates):
    """The sum is added to in another shape than it is returned in."""
    y = torch.zeros_like(x)
    rows, weights, out = x.view(-1, DIM), gates.view(-1, CHOICES), y.view(-1, DIM)
    mask = F.one_hot(indices, EXPERTS).view(-1, CHOICES, EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        k, token = torch.where(mask[e])
        out.index_add_(0, token, expert(rows[token]) * weights[token, k, None])
    return y


def marked_gates(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y = y + (gates * (indices == e)).sum(-1, keepdim=True) * expert(x)
    return y


def mask_of_the_largest(m, x, indices, gates):
    scores = m.router(x).softmax(-1)
    best, y = scores.argmax(-1), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y[best == e] = expert(x[best == e]) * scores[best == e][:, e, None]
    return y


def mask_of_the_only(m, x, indices, gates):
    gate, best = m.router(x).softmax(-1).topk(1, -1)
    gate, best = gate.squeeze(-1), best.squeeze(-1)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = best == e
        y[mask] += expert(x[mask]) * gate[mask].unsqueeze(-1)
    return y


def mask_of_each_choice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        for e, expert in enumerate(m.experts):
            mask = indices[..., k] == e
            y[mask] += gates[mask][:, k, None] * expert(x[mask])
    return y


BATCHES = [where_of_three, scaled_rows_of_three, mask_in_both_shapes, one_hots_in_one_shape, marked_gates,
           mask_of_the_largest, mask_of_the_only, mask_of_each_choice]  # fmt: skip


# --- near misses: there are as many sequences as tokens in each, so that shapes do not tell


def rows_across(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        b, s, k = torch.where(indices == e)
        y[b, s] += expert(x[s, b]) * gates[b, s, k, None]
    return y


def gates_across(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        b, s, k = torch.where(indices == e)
        y[b, s] += expert(x[b, s]) * gates[s, b, k, None]
    return y


def sums_across(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        b, s, k = torch.where(indices == e)
        y[s, b] += expert(x[b, s]) * gates[b, s, k, None]
    return y


def mask_across(m, x, indices, gates):
    combine = torch.zeros_like(m.router(x)).scatter(-1, indices, gates)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (indices == e).any(dim=-1)
        flat = mask.t().reshape(-1)
        y[mask] += expert(x.view(-1, DIM)[flat]) * combine.view(-1, EXPERTS)[flat, e, None]
    return y


BATCHES_NEAR_MISSES = {"rows": [rows_across], "gates": [gates_across, mask_across], "no-rows": [sums_across]}
