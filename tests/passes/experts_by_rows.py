"""Loops over experts that number, mark or weigh their rows in other ways than by `where(indices == e)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .experts import CHOICES

# --- tokens' choices in one dimension


def tokens_of_slots(m, x, indices, gates):
    y, ids, weights = torch.zeros_like(x), indices.flatten(), gates.flatten()
    token = torch.arange(x.shape[0]).repeat_interleave(CHOICES)
    for e, expert in enumerate(m.experts):
        own = ids == e
        y.index_add_(0, token[own], expert(x[token[own]]) * weights[own].unsqueeze(-1))
    return y


def tokens_at_places(m, x, indices, gates):
    y, ids, weights = torch.zeros_like(x), indices.view(-1), gates.view(-1, 1)
    token = torch.arange(x.shape[0]).unsqueeze(1).expand(-1, CHOICES).reshape(-1)
    for e, expert in enumerate(m.experts):
        (place,) = torch.where(ids == e)
        rows = token[place]
        y.index_add_(0, rows, expert(x[rows]) * weights[place])
    return y


def places_over_choices(m, x, indices, gates):
    y, ids = torch.zeros_like(x), indices.reshape(-1)
    rows = x.repeat_interleave(CHOICES, dim=0)
    for e, expert in enumerate(m.experts):
        place = (ids == e).nonzero().squeeze(-1)
        y.index_add_(0, place // CHOICES, expert(rows[place]) * gates.reshape(-1)[place, None])
    return y


# --- gates at the rows of a token's own choice, whichever it is


def gates_at_marks(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        own = indices == e
        rows = own.any(dim=-1).nonzero().flatten()
        y.index_add_(0, rows, expert(x[rows]) * gates[own].view(-1, 1))
    return y


def gates_at_marks_of_rows(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = (indices == e).any(-1)
        own = gates[rows][indices[rows] == e]
        y[rows] += own.unsqueeze(-1) * expert(x[rows])
    return y


def gates_summed_for_rows(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        own = indices == e
        rows = own.any(-1)
        y[rows] += expert(x[rows]) * (gates[rows] * own[rows].float()).sum(-1, keepdim=True)
    return y


def gates_gathered_at_the_first_mark(m, x, indices, gates):
    """As in "LLMs from scratch": there is one mark, so the first is where the expert was chosen."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        own = indices == e
        rows = own.any(dim=-1).nonzero(as_tuple=False).squeeze(-1)
        slot = own[rows].int().argmax(dim=-1, keepdim=True)
        weight = torch.gather(gates.index_select(0, rows), dim=-1, index=slot).squeeze(-1)
        y.index_add_(0, rows, expert(x.index_select(0, rows)) * weight.unsqueeze(-1))
    return y


def rows_of_counted_choices(m, x, indices, gates):
    """A sum of one-hots of distinct choices is 0 or 1."""
    y, marks = torch.zeros_like(x), F.one_hot(indices, m.num_experts).sum(dim=1)
    for e, expert in enumerate(m.experts):
        rows = marks[:, e].bool()
        weight = torch.where(indices == e, gates, 0.0).sum(-1)
        y[rows] += expert(x[rows]) * weight[rows, None]
    return y


def rows_of_scattered_marks(m, x, indices, gates):
    y = torch.zeros_like(x)
    marks = torch.zeros(x.shape[0], m.num_experts).scatter_(1, indices, 1)
    for e, expert in enumerate(m.experts):
        rows = marks[:, e].nonzero().squeeze(1)
        weight = (gates * (indices == e)).sum(-1)
        y.index_add_(0, rows, expert(x[rows]) * weight[rows].unsqueeze(1))
    return y


# --- rows whose gate is not zero, or above it: some here are below


def _some_below(gates):
    return gates - 0.4


def rows_with_a_gate_above_zero(m, x, indices, gates):
    y, gates = torch.zeros_like(x), _some_below(gates)
    matrix = torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype).scatter(1, indices, gates)
    for e, expert in enumerate(m.experts):
        rows = matrix[:, e] > 0
        y[rows] += matrix[rows, e].unsqueeze(-1) * expert(x[rows])
    return y


def rows_with_an_own_gate_above_zero(m, x, indices, gates):
    y, gates = torch.zeros_like(x), _some_below(gates)
    for e, expert in enumerate(m.experts):
        weight = (gates * (indices == e)).sum(dim=-1)
        rows = weight > 0
        y[rows] += expert(x[rows]) * weight[rows].unsqueeze(-1)
    return y


def rows_with_a_gate(m, x, indices, gates):
    y, gates = torch.zeros_like(x), _some_below(gates).relu()
    matrix = torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype).scatter_add(1, indices, gates)
    for e, expert in enumerate(m.experts):
        rows = torch.nonzero(matrix[:, e]).flatten()
        y.index_add_(0, rows, expert(x[rows]) * matrix[rows, e].unsqueeze(-1))
    return y


# --- outputs that are weighted elsewhere, or not at all


def written_for_every_choice(m, x, indices, gates):
    out = x.new_zeros(*indices.shape, x.shape[-1])
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        out[token, choice] = expert(x[token])
    return (out * gates.unsqueeze(-1)).sum(1)


def gathered_from_all(m, x, indices, gates):
    every = torch.stack([expert(x) for expert in m.experts], dim=1)
    own = every.gather(1, indices.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return (own * gates.unsqueeze(-1)).sum(dim=1)


def summed_without_a_gate(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, _ = torch.where(indices == e)
        y.index_add_(0, token, expert(x[token]))
    return y


def written_without_a_gate(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = indices[:, 0] == e
        y[rows] = expert(x[rows])
    return y


def written_over_the_input(m, x, indices, gates):
    """Every row has one of the experts as its first choice."""
    y = x.clone()
    for e, expert in enumerate(m.experts):
        rows = indices[:, 0] == e
        y[rows] = expert(x[rows]) * gates[rows, 0, None]
    return y


def states_in_a_loop_of_their_own(m, x, indices, gates):
    y, masks = torch.zeros_like(x), F.one_hot(indices, m.num_experts).permute(2, 1, 0)
    states = []
    for e, expert in enumerate(m.experts):
        _, token = torch.where(masks[e])
        states.append(expert(x[token]))
    for e, state in enumerate(states):
        choice, token = torch.where(masks[e])
        y.index_add_(0, token, state * gates[token, choice, None])
    return y


ROWS = [tokens_of_slots, tokens_at_places, places_over_choices, gates_at_marks, gates_at_marks_of_rows,
        gates_gathered_at_the_first_mark,
        gates_summed_for_rows, rows_of_counted_choices, rows_of_scattered_marks, rows_with_a_gate_above_zero,
        rows_with_an_own_gate_above_zero, rows_with_a_gate, written_for_every_choice, gathered_from_all,
        summed_without_a_gate, written_without_a_gate, written_over_the_input, states_in_a_loop_of_their_own]  # fmt: skip


# --- of one choice


def gate_behind_the_sum(m, x, indices, gates):
    y, ids = torch.zeros_like(x), indices.squeeze(-1)
    for e, expert in enumerate(m.experts):
        (token,) = torch.where(ids == e)
        y.index_add_(0, token, expert(x[token]))
    return y * gates


def gate_behind_what_is_written(m, x, indices, gates):
    gate, ids = m.router(x).softmax(-1).max(dim=-1)
    y = x.clone()  # every row of it is written
    for e, expert in enumerate(m.experts):
        rows = ids == e
        y[rows] = expert(x[rows])
    return gate[:, None] * y


def one_hots_of_the_largest(m, x, indices, gates):
    marks = F.one_hot(m.router(x).argmax(-1), m.num_experts).to(x.dtype)
    return torch.einsum("te,ted->td", marks, torch.stack([expert(x) for expert in m.experts], dim=1)) * gates


ONE = [gate_behind_the_sum, gate_behind_what_is_written, one_hots_of_the_largest]


# --- of [B, S] tokens


def choices_in_one_dimension(m, x, indices, gates):
    rows, y = x.view(-1, x.shape[-1]), torch.zeros_like(x.view(-1, x.shape[-1]))
    for k in range(CHOICES):
        ids, weights = indices[:, :, k].flatten(), gates[:, :, k].flatten().unsqueeze(1)
        for e, expert in enumerate(m.experts):
            own = ids == e
            y[own] += expert(rows[own]) * weights[own]
    return y.view_as(x)


def one_hots_of_each_choice(m, x, indices, gates):
    y = torch.zeros_like(x)
    for k in range(CHOICES):
        marks = F.one_hot(indices[..., k], m.num_experts)
        for e, expert in enumerate(m.experts):
            own = marks[..., e].bool()
            y[own] += expert(x[own]) * gates[..., k][own].unsqueeze(-1)
    return y


BATCHES = [choices_in_one_dimension, one_hots_of_each_choice]


# --- near misses


def tokens_of_other_slots(m, x, indices, gates):
    """Slots of the tokens repeated as a whole."""
    y, ids, weights = torch.zeros_like(x), indices.flatten(), gates.flatten()
    token = torch.arange(x.shape[0]).repeat(CHOICES)
    for e, expert in enumerate(m.experts):
        own = ids == e
        y.index_add_(0, token[own], expert(x[token[own]]) * weights[own].unsqueeze(-1))
    return y


def gates_of_other_slots(m, x, indices, gates):
    y, ids, weights = torch.zeros_like(x), indices.flatten(), gates.t().flatten()
    token = torch.arange(x.shape[0]).repeat_interleave(CHOICES)
    for e, expert in enumerate(m.experts):
        own = ids == e
        y.index_add_(0, token[own], expert(x[token[own]]) * weights[own].unsqueeze(-1))
    return y


def gates_at_marks_of_another(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = (indices == e).any(-1)
        own = gates[rows][indices[rows] == indices[rows].amax(-1, keepdim=True)]
        y[rows] += own.unsqueeze(-1) * expert(x[rows])
    return y


def gathered_at_the_first_mark_of_another(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        own, other = indices == e, indices == (e + 1) % m.num_experts
        rows = own.any(-1).nonzero().squeeze(-1)
        slot = other[rows].int().argmax(-1, keepdim=True)
        y.index_add_(0, rows, expert(x[rows]) * gates[rows].gather(-1, slot))
    return y


def gathered_at_the_first_mark_of_choices_that_repeat(m, x, indices, gates):
    """A token that chose an expert twice has its first gate alone."""
    y, indices = torch.zeros_like(x), indices // 2
    for e, expert in enumerate(m.experts):
        own = indices == e
        rows = own.any(-1).nonzero().squeeze(-1)
        slot = own[rows].int().argmax(-1, keepdim=True)
        y.index_add_(0, rows, expert(x[rows]) * gates[rows].gather(-1, slot))
    return y


def gathered_where_no_mark_is(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        own = indices == e
        rows = own.any(-1).nonzero().squeeze(-1)
        slot = own[rows].int().argmin(-1, keepdim=True)
        y.index_add_(0, rows, expert(x[rows]) * gates[rows].gather(-1, slot))
    return y


def rows_with_a_large_gate(m, x, indices, gates):
    y = torch.zeros_like(x)
    matrix = torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype).scatter(1, indices, gates)
    for e, expert in enumerate(m.experts):
        rows = torch.where(matrix[:, e] > 0.4)[0]
        y.index_add_(0, rows, matrix[rows, e].unsqueeze(-1) * expert(x[rows]))
    return y


def weighted_by_others_than_choose(m, x, indices, gates):
    """Rows have a gate above zero, and another weight."""
    y, scores = torch.zeros_like(x), m.router(x).softmax(-1)
    matrix = torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype).scatter(1, indices, _some_below(gates))
    for e, expert in enumerate(m.experts):
        rows = matrix[:, e] > 0
        y[rows] += scores[rows, e].unsqueeze(-1) * expert(x[rows])
    return y


def gathered_from_others(m, x, indices, gates):
    """Of every second token, for the first ones."""
    every = torch.stack([expert(x) for expert in m.experts], dim=1)[: x.shape[0] - 1]
    own = every.gather(1, indices[1:].unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return (own * gates[1:].unsqueeze(-1)).sum(dim=1)


NEAR_MISSES = {
    "no-rows": [tokens_of_other_slots, rows_with_a_large_gate],
    "gates": [gates_of_other_slots, gates_at_marks_of_another, weighted_by_others_than_choose,
              gathered_at_the_first_mark_of_another, gathered_at_the_first_mark_of_choices_that_repeat,
              gathered_where_no_mark_is],
}
