"""Experts by copies of their weights, one choice after the other or on one row for each choice, and what looks like it."""

from __future__ import annotations

import torch

from .experts import CHOICES, DIM, EXPERTS, by_name, matrix, swiglu


def expert(m, x, ids, down_ids=None, scale=None):
    """What each row's own expert makes of it."""
    hidden = swiglu(torch.einsum("...d,...hd->...h", x, m.gate_up[ids]))
    down = m.down if scale is None else m.down * scale
    return torch.einsum("...h,...dh->...d", hidden, down[ids if down_ids is None else down_ids])


def by_matmul(m, x, ids):
    hidden = swiglu((m.gate_up[ids] @ x.unsqueeze(-1)).squeeze(-1))
    return torch.matmul(hidden[..., None, :], m.down[ids].mT).squeeze(-2)


def summed(out):
    """The sum of `out(m, x, indices, gates, k)` over choices."""
    return lambda m, x, indices, gates: sum(out(m, x, indices, gates, k) for k in range(CHOICES))


# --- sums over choices, written out


def einsums(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        y = y + gates[..., k, None] * expert(m, x, indices[..., k])
    return y


def products_in_place(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        y += by_matmul(m, x, indices[..., k]) * gates[..., k : k + 1]
    return y


def on_the_residual(m, x, indices, gates):
    y = x
    for ids, gate in zip(indices.unbind(-1), gates.unbind(-1), strict=True):
        y = y + expert(m, x, ids) * gate.unsqueeze(-1)
    return y


def stacked(m, x, indices, gates):
    outs = torch.stack([expert(m, x, indices[:, k]) for k in range(CHOICES)], 1)
    return (outs * gates[..., None]).sum(1)


def in_float32(m, x, indices, gates):
    y = torch.zeros_like(x, dtype=torch.float32)
    for k in range(CHOICES):
        y = y + (by_matmul(m, x, indices[:, k]) * gates[:, k, None]).float()
    return y.to(x.dtype)


by_sum = summed(lambda m, x, i, g, k: g[:, k, None] * by_matmul(m, x, i[:, k]))
SUMS = by_name(einsums, products_in_place, on_the_residual, stacked, in_float32) | {
    "by_sum": by_sum,
    "of_batches": lambda m, x, i, g: einsums(m, *(t[:10].view(2, 5, -1) for t in (x, i, g))),
}


# --- a row for each choice, summed in other ways


def rows_of(m, x, indices):
    return expert(m, x.repeat_interleave(CHOICES, 0), indices.reshape(-1))


def weighted_rows(m, x, indices, gates):
    return rows_of(m, x, indices) * gates.reshape(-1, 1)


def every_other_row(m, x, indices, gates):
    rows = weighted_rows(m, x, indices, gates)
    return rows[0::2] + rows[1::2]


def choices_first(m, x, indices, gates):
    rows = expert(m, x.repeat(CHOICES, 1), indices.t().reshape(-1)) * gates.t().reshape(-1, 1)
    return rows[: len(x)] + rows[len(x) :]


ROWS = by_name(weighted_rows, every_other_row, choices_first) | {
    "mean_of_choices": lambda m, x, i, g: weighted_rows(m, x, i, g).view(-1, CHOICES, DIM).mean(1),
    "without_gates": lambda m, x, i, g: rows_of(m, x, i).view(-1, CHOICES, DIM).sum(1) * g.sum(-1, keepdim=True),
    "first_choice_alone": lambda m, x, i, g: g[:, :1] * expert(m, x, i[:, 0]),
    # Rows of one token and choices of another: experts on rows all the same.
    "in_another_order": lambda m, x, i, g: (
        expert(m, x.repeat_interleave(CHOICES, 0), i.t().reshape(-1)).view(-1, CHOICES, DIM).sum(1)),
}  # fmt: skip


# --- sums that are none over a token's choices: each choice is a layer of its own


def difference(m, x, indices, gates):
    first, second = (gates[:, k, None] * expert(m, x, indices[:, k]) for k in range(CHOICES))
    return first - second


APART = {
    "gates_of_the_other_choice": summed(lambda m, x, i, g, k: g[:, 1 - k, None] * expert(m, x, i[:, k])),
    "one_gate_for_both": summed(lambda m, x, i, g, k: g[:, :1] * expert(m, x, i[:, k])),
    "other_rows_for_the_second": summed(lambda m, x, i, g, k: g[:, k, None] * expert(m, x.roll(k, 0), i[:, k])),
    "other_weights_for_the_second": summed(
        lambda m, x, i, g, k: g[:, k, None] * expert(m, x, i[:, k], scale=k + 1)),
    "difference": difference,
}  # fmt: skip


# --- what stays


def keeps_what_is_hidden(m, x, indices, gates):
    hidden = swiglu(torch.einsum("td,thd->th", x, m.gate_up[indices[:, 0]]))
    return gates[:, :1] * torch.einsum("th,tdh->td", hidden, m.down[indices[:, 0]]), hidden


# name: (the tag of the refusal, body)
NEAR = {
    "projections_of_different_choices": (
        "indices", summed(lambda m, x, i, g, k: g[:, k, None] * expert(m, x, i[:, k], i[:, 1 - k]))),
    "numbers_below_zero": ("range", summed(lambda m, x, i, g, k: g[:, k, None] * expert(m, x, i[:, k] - EXPERTS))),
    "keeps_what_is_hidden": ("escapes", keeps_what_is_hidden),
    "one_projection": ("projections", summed(
        lambda m, x, i, g, k: g[:, k, None] * torch.einsum("td,thd->th", x, m.gate_up[i[:, k]]))),
    "one_projection_of_all_choices": (
        "projections", lambda m, x, i, g: torch.einsum("td,tkhd,tk->th", x, m.gate_up[i], g)),
    "one_projection_of_all_experts": ("projections", lambda m, x, i, g: torch.einsum(
        "te,teh->th", matrix(i, g), torch.einsum("td,ehd->teh", x, m.gate_up))),
}  # fmt: skip
