"""Experts by copies of their weights, one choice after the other or on one row for each choice, and what looks like it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .experts import CHOICES, DIM, EXPERTS


def expert(m, x, ids, down_ids=None, down=None):
    """What each row's own expert makes of it."""
    gate, up = torch.einsum("...d,...hd->...h", x, m.gate_up[ids]).chunk(2, -1)
    return torch.einsum("...h,...dh->...d", F.silu(gate) * up, (m.down if down is None else down)[ids if down_ids is None else down_ids])


def by_matmul(m, x, ids):
    gate, up = (m.gate_up[ids] @ x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    return torch.matmul((F.silu(gate) * up)[..., None, :], m.down[ids].mT).squeeze(-2)


# --- sums over choices, written out


def einsums(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        y = y + gates[:, k, None] * expert(m, x, indices[:, k])
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


def by_sum(m, x, indices, gates):
    return sum(gates[:, k, None] * by_matmul(m, x, indices[:, k]) for k in range(CHOICES))


def stacked(m, x, indices, gates):
    outs = torch.stack([expert(m, x, indices[:, k]) for k in range(CHOICES)], 1)
    return (outs * gates[..., None]).sum(1)


def of_batches(m, x, indices, gates):
    x, indices, gates = (t[:10].view(2, 5, -1) for t in (x, indices, gates))
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        y = y + gates[..., k, None] * expert(m, x, indices[..., k])
    return y


def in_float32(m, x, indices, gates):
    y = torch.zeros_like(x, dtype=torch.float32)
    for k in range(CHOICES):
        y = y + (by_matmul(m, x, indices[:, k]) * gates[:, k, None]).float()
    return y.to(x.dtype)


SUMS = (einsums, products_in_place, on_the_residual, by_sum, stacked, of_batches, in_float32)


# --- a row for each choice, summed in other ways


def _rows(m, x, indices):
    return expert(m, x.repeat_interleave(CHOICES, 0), indices.reshape(-1))


def weighted_rows(m, x, indices, gates):
    return _rows(m, x, indices) * gates.reshape(-1, 1)


def mean_of_choices(m, x, indices, gates):
    return weighted_rows(m, x, indices, gates).view(-1, CHOICES, DIM).mean(1)


def every_other_row(m, x, indices, gates):
    rows = weighted_rows(m, x, indices, gates)
    return rows[0::2] + rows[1::2]


def choices_first(m, x, indices, gates):
    rows = expert(m, x.repeat(CHOICES, 1), indices.t().reshape(-1)) * gates.t().reshape(-1, 1)
    return rows[: len(x)] + rows[len(x) :]


def without_gates(m, x, indices, gates):
    return _rows(m, x, indices).view(-1, CHOICES, DIM).sum(1) * gates.sum(-1, keepdim=True)


def first_choice_alone(m, x, indices, gates):
    return gates[:, :1] * expert(m, x, indices[:, 0])


def in_another_order(m, x, indices, gates):
    """Rows of one token and choices of another: experts on rows all the same."""
    rows = expert(m, x.repeat_interleave(CHOICES, 0), indices.t().reshape(-1))
    return rows.view(-1, CHOICES, DIM).sum(1)


ROWS = (weighted_rows, mean_of_choices, every_other_row, choices_first, without_gates, first_choice_alone, in_another_order)


# --- sums that are none over a token's choices: each choice is a layer of its own


def gates_of_the_other_choice(m, x, indices, gates):
    return sum(gates[:, 1 - k, None] * expert(m, x, indices[:, k]) for k in range(CHOICES))


def one_gate_for_both(m, x, indices, gates):
    return sum(gates[:, :1] * expert(m, x, indices[:, k]) for k in range(CHOICES))


def other_rows_for_the_second(m, x, indices, gates):
    return sum(gates[:, k, None] * expert(m, x.roll(k, 0), indices[:, k]) for k in range(CHOICES))


def other_weights_for_the_second(m, x, indices, gates):
    return sum(gates[:, k, None] * expert(m, x, indices[:, k], down=m.down * (k + 1)) for k in range(CHOICES))


def difference(m, x, indices, gates):
    first, second = (gates[:, k, None] * expert(m, x, indices[:, k]) for k in range(CHOICES))
    return first - second


APART = (gates_of_the_other_choice, one_gate_for_both, other_rows_for_the_second, other_weights_for_the_second, difference)


# --- what stays


def projections_of_different_choices(m, x, indices, gates):
    return sum(gates[:, k, None] * expert(m, x, indices[:, k], indices[:, 1 - k]) for k in range(CHOICES))


def numbers_below_zero(m, x, indices, gates):
    return sum(gates[:, k, None] * expert(m, x, indices[:, k] - EXPERTS) for k in range(CHOICES))


def keeps_what_is_hidden(m, x, indices, gates):
    gate, up = torch.einsum("td,thd->th", x, m.gate_up[indices[:, 0]]).chunk(2, -1)
    hidden = F.silu(gate) * up
    return gates[:, :1] * torch.einsum("th,tdh->td", hidden, m.down[indices[:, 0]]), hidden


def one_projection(m, x, indices, gates):
    return sum(gates[:, k, None] * torch.einsum("td,thd->th", x, m.gate_up[indices[:, k]]) for k in range(CHOICES))


def one_projection_of_all_choices(m, x, indices, gates):
    return torch.einsum("td,tkhd,tk->th", x, m.gate_up[indices], gates)


def one_projection_of_all_experts(m, x, indices, gates):
    outs = torch.einsum("td,ehd->teh", x, m.gate_up)
    return torch.einsum("te,teh->th", torch.zeros(len(x), EXPERTS).scatter(1, indices, gates), outs)


NEAR = {
    projections_of_different_choices: "indices", numbers_below_zero: "range", keeps_what_is_hidden: "escapes",
    one_projection: "projections", one_projection_of_all_choices: "projections",
    one_projection_of_all_experts: "projections",
}  # fmt: skip
