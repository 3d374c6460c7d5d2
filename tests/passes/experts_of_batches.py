"""Routed experts where tokens have two dimensions, [B, S], as they are or in one, and what looks like them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .experts import CHOICES, DIM, EXPERTS, by_name, loop, over_experts


def added_at(y, rows, out):
    y[rows[0], rows[1]] += out
    return y


def of_three(out, name="", add=added_at):
    """The body that adds `out(m, x, gates, e, b, s, k)` at the rows (b, s)."""

    def found(marks):
        b, s, k = torch.where(marks)
        return (b, s), k

    return loop(lambda m, x, gates, e, at, k: out(m, x, gates, e, *at, k), name, found, add=add)


where_of_three = of_three(lambda m, x, g, e, b, s, k: m.experts[e](x[b, s]) * g[b, s, k, None], "where_of_three")
scaled_rows_of_three = of_three(
    lambda m, x, g, e, b, s, k: m.experts[e](x[b, s] * g[b, s, k, None]), "scaled_rows_of_three",
    add=lambda y, rows, out: y.index_put(rows, out, accumulate=True))  # fmt: skip


def mask_in_both_shapes(m, x, indices, gates, combine=None, flat=lambda mask: mask.view(-1)):
    """As makeMoE and nanoMoE have it, but for their branch."""
    if combine is None:
        combine = torch.full_like(m.router(x), float("-inf")).scatter(-1, indices, gates).softmax(-1)
    rows, columns = x.view(-1, DIM), combine.view(-1, EXPERTS)

    def out(e, mask):
        at = flat(mask)
        return m.experts[e](rows[at]) * columns[at, e].unsqueeze(1)

    return over_experts(m, x, lambda e: ((indices == e).any(dim=-1),), out, add="+=")


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
    out = lambda e, mask: m.experts[e](x[mask]) * gate[mask].unsqueeze(-1)  # noqa: E731
    return over_experts(m, x, lambda e: (best == e,), out, add="+=")


def mask_of_each_choice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        for e, expert in enumerate(m.experts):
            mask = indices[..., k] == e
            y[mask] += gates[mask][:, k, None] * expert(x[mask])
    return y


BATCHES = by_name(where_of_three, scaled_rows_of_three, mask_in_both_shapes, one_hots_in_one_shape, marked_gates,
                  mask_of_the_largest, mask_of_the_only, mask_of_each_choice)  # fmt: skip

# Near misses, of as many sequences as tokens in each, so that shapes do not tell. name: (the tag of the refusal, body)
BATCHES_NEAR_MISSES = {
    "rows_across": ("rows", of_three(lambda m, x, g, e, b, s, k: m.experts[e](x[s, b]) * g[b, s, k, None])),
    "gates_across": ("gates", of_three(lambda m, x, g, e, b, s, k: m.experts[e](x[b, s]) * g[s, b, k, None])),
    "mask_across": ("gates", lambda m, x, i, g: mask_in_both_shapes(
        m, x, i, g, torch.zeros_like(m.router(x)).scatter(-1, i, g), lambda mask: mask.t().reshape(-1))),
    "sums_across": ("no-rows", of_three(
        lambda m, x, g, e, b, s, k: m.experts[e](x[b, s]) * g[b, s, k, None],
        add=lambda y, rows, out: added_at(y, rows[::-1], out))),
}  # fmt: skip
