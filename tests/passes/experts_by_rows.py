"""Loops over experts that number, mark or weigh their rows in other ways than by `where(indices == e)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import CHOICES, by_name, loop, matrix, over_experts

# --- tokens' choices in one dimension


def of_slots(numbers=lambda x: torch.arange(x.shape[0]).repeat_interleave(CHOICES), turned=lambda gates: gates):
    """numbers: each slot's token; turned: gates, before they are flattened."""

    def body(m, x, indices, gates):
        y, ids, weights, token = torch.zeros_like(x), indices.flatten(), turned(gates).flatten(), numbers(x)
        for e, expert in enumerate(m.experts):
            own = ids == e
            y.index_add_(0, token[own], expert(x[token[own]]) * weights[own].unsqueeze(-1))
        return y

    return body


def tokens_at_places(m, x, indices, gates):
    ids, weights = indices.view(-1), gates.view(-1, 1)
    token = torch.arange(x.shape[0]).unsqueeze(1).expand(-1, CHOICES).reshape(-1)

    def found(e):
        (place,) = torch.where(ids == e)
        return token[place], place

    return over_experts(m, x, found, lambda e, rows, place: m.experts[e](x[rows]) * weights[place])


def places_over_choices(m, x, indices, gates):
    ids, rows = indices.reshape(-1), x.repeat_interleave(CHOICES, dim=0)

    def found(e):
        place = (ids == e).nonzero().squeeze(-1)
        return place // CHOICES, place

    return over_experts(m, x, found, lambda e, _, place: m.experts[e](rows[place]) * gates.reshape(-1)[place, None])


# --- gates at the rows of a token's own choice, whichever it is


def gates_at_marks_of_rows(m, x, indices, gates, own=lambda chosen, e: chosen == e):
    def out(e, rows):
        return gates[rows][own(indices[rows], e)].unsqueeze(-1) * m.experts[e](x[rows])

    return over_experts(m, x, lambda e: ((indices == e).any(-1),), out, add="+=")


def gates_gathered_at_the_first_mark(m, x, indices, gates):
    """As in "LLMs from scratch": there is one mark, so the first is where the expert was chosen."""

    def out(e, rows, own):
        slot = own[rows].int().argmax(dim=-1, keepdim=True)
        weight = torch.gather(gates.index_select(0, rows), dim=-1, index=slot).squeeze(-1)
        return m.experts[e](x.index_select(0, rows)) * weight.unsqueeze(-1)

    def found(e):
        own = indices == e
        return own.any(dim=-1).nonzero(as_tuple=False).squeeze(-1), own

    return over_experts(m, x, found, out)


def rows_of_counted_choices(m, x, indices, gates):
    """A sum of one-hots of distinct choices is 0 or 1."""
    marks = F.one_hot(indices, m.num_experts).sum(dim=1)

    def out(e, rows):
        weight = torch.where(indices == e, gates, 0.0).sum(-1)
        return m.experts[e](x[rows]) * weight[rows, None]

    return over_experts(m, x, lambda e: (marks[:, e].bool(),), out, add="+=")


def rows_of_scattered_marks(m, x, indices, gates):
    marks = torch.zeros(x.shape[0], m.num_experts).scatter_(1, indices, 1)

    def out(e, rows):
        weight = (gates * (indices == e)).sum(-1)
        return m.experts[e](x[rows]) * weight[rows].unsqueeze(1)

    return over_experts(m, x, lambda e: (marks[:, e].nonzero().squeeze(1),), out)


# --- rows whose gate is not zero, or above it: some here are below


def by_matrix(found, out, some=lambda gates: gates - 0.4, scatter=Tensor.scatter, **options):
    """The rows of an expert are `found` in its column of the matrix of gates, `some` of them."""

    def body(m, x, indices, gates):
        every = scatter(torch.zeros(x.shape[0], m.num_experts, dtype=x.dtype), 1, indices, some(gates))
        rows = lambda e: (found(every[:, e]),)  # noqa: E731
        return over_experts(m, x, rows, lambda e, rows: out(m, x, every, e, rows), **options)

    return body


def rows_with_an_own_gate_above_zero(m, x, indices, gates):
    some_below = gates - 0.4

    def found(e):
        weight = (some_below * (indices == e)).sum(dim=-1)
        return weight > 0, weight

    out = lambda e, rows, weight: m.experts[e](x[rows]) * weight[rows].unsqueeze(-1)  # noqa: E731
    return over_experts(m, x, found, out, add="+=")


# --- outputs that are weighted elsewhere, or not at all


def written_for_every_choice(m, x, indices, gates):
    out = x.new_zeros(*indices.shape, x.shape[-1])
    for e, expert in enumerate(m.experts):
        token, choice = torch.where(indices == e)
        out[token, choice] = expert(x[token])
    return (out * gates.unsqueeze(-1)).sum(1)


def gathered_from_all(m, x, indices, gates, some=lambda every: every):
    every = some(torch.stack([expert(x) for expert in m.experts], dim=1))
    own = every.gather(1, indices.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return (own * gates.unsqueeze(-1)).sum(dim=1)


def by_first_choice(out, onto=torch.zeros_like):
    def body(m, x, indices, gates):
        found = lambda e: (indices[:, 0] == e,)  # noqa: E731
        return over_experts(m, x, found, lambda e, rows: out(m, x, gates, e, rows), onto=onto, add="=")

    return body


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


ROWS = by_name(
    tokens_at_places, places_over_choices, gates_at_marks_of_rows, gates_gathered_at_the_first_mark,
    rows_of_counted_choices, rows_of_scattered_marks, rows_with_an_own_gate_above_zero, written_for_every_choice,
    gathered_from_all, states_in_a_loop_of_their_own,
) | {
    "tokens_of_slots": of_slots(),
    "gates_at_marks": loop(
        lambda m, x, g, e, rows, own: m.experts[e](x[rows]) * g[own].view(-1, 1),
        found=lambda own: (own.any(dim=-1).nonzero().flatten(), own)),
    "gates_summed_for_rows": loop(
        lambda m, x, g, e, rows, own: m.experts[e](x[rows]) * (g[rows] * own[rows].float()).sum(-1, keepdim=True),
        found=lambda own: (own.any(-1), own), add="+="),
    "rows_with_a_gate_above_zero": by_matrix(
        lambda column: column > 0, lambda m, x, every, e, rows: every[rows, e].unsqueeze(-1) * m.experts[e](x[rows]),
        add="+="),
    "rows_with_a_gate": by_matrix(
        lambda column: torch.nonzero(column).flatten(),
        lambda m, x, every, e, rows: m.experts[e](x[rows]) * every[rows, e].unsqueeze(-1),
        some=lambda gates: (gates - 0.4).relu(), scatter=Tensor.scatter_add),
    "summed_without_a_gate": loop(lambda m, x, g, e, token, _: m.experts[e](x[token])),
    "written_without_a_gate": by_first_choice(lambda m, x, g, e, rows: m.experts[e](x[rows])),
    # Every row has one of the experts as its first choice.
    "written_over_the_input": by_first_choice(
        lambda m, x, g, e, rows: m.experts[e](x[rows]) * g[rows, 0, None], onto=Tensor.clone),
}  # fmt: skip

# --- of one choice


def gate_behind_the_sum(m, x, indices, gates):
    ids = indices.squeeze(-1)
    return over_experts(m, x, lambda e: torch.where(ids == e), lambda e, token: m.experts[e](x[token])) * gates


def gate_behind_what_is_written(m, x, indices, gates):
    gate, ids = m.router(x).softmax(-1).max(dim=-1)
    found, out = lambda e: (ids == e,), lambda e, rows: m.experts[e](x[rows])  # every row of the clone is written
    return gate[:, None] * over_experts(m, x, found, out, onto=Tensor.clone, add="=")


def one_hots_of_the_largest(m, x, indices, gates):
    marks = F.one_hot(m.router(x).argmax(-1), m.num_experts).to(x.dtype)
    return torch.einsum("te,ted->td", marks, torch.stack([expert(x) for expert in m.experts], dim=1)) * gates


ONE = by_name(gate_behind_the_sum, gate_behind_what_is_written, one_hots_of_the_largest)

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


BATCHES = by_name(choices_in_one_dimension, one_hots_of_each_choice)

# --- near misses


def gathered_at(marks=lambda own, indices, e: own, place=Tensor.argmax, chosen=lambda indices: indices):
    """Gates at the first of `marks`."""

    def body(m, x, indices, gates):
        indices = chosen(indices)

        def found(e):
            own = indices == e
            return own.any(-1).nonzero().squeeze(-1), marks(own, indices, e)

        def out(e, rows, marks):
            return m.experts[e](x[rows]) * gates[rows].gather(-1, place(marks[rows].int(), -1, keepdim=True))

        return over_experts(m, x, found, out)

    return body


def weighted_by_others_than_choose(m, x, indices, gates):
    """Rows have a gate above zero, and another weight."""
    scores, every = m.router(x).softmax(-1), matrix(indices, gates - 0.4)
    out = lambda e, rows: scores[rows, e].unsqueeze(-1) * m.experts[e](x[rows])  # noqa: E731
    return over_experts(m, x, lambda e: (every[:, e] > 0,), out, add="+=")


def gathered_from_others(m, x, indices, gates):
    """Of every second token, for the first ones."""
    return gathered_from_all(m, x, indices[1:], gates[1:], lambda every: every[: x.shape[0] - 1])


# name: (the tag of the refusal, body)
NEAR_MISSES = {
    # slots of the tokens repeated as a whole
    "tokens_of_other_slots": ("no-rows", of_slots(lambda x: torch.arange(x.shape[0]).repeat(CHOICES))),
    "rows_with_a_large_gate": ("no-rows", by_matrix(
        lambda column: torch.where(column > 0.4)[0],
        lambda m, x, every, e, rows: every[rows, e].unsqueeze(-1) * m.experts[e](x[rows]), some=lambda gates: gates)),
    "gates_of_other_slots": ("gates", of_slots(turned=Tensor.t)),
    "gates_at_marks_of_another": ("gates", lambda m, x, indices, gates: gates_at_marks_of_rows(
        m, x, indices, gates, lambda chosen, e: chosen == chosen.amax(-1, keepdim=True))),
    "weighted_by_others_than_choose": ("gates", weighted_by_others_than_choose),
    "gathered_at_the_first_mark_of_another": ("gates", gathered_at(lambda own, indices, e: indices == (e + 1) % 3)),
    # A token that chose an expert twice has its first gate alone.
    "gathered_at_the_first_mark_of_choices_that_repeat": ("gates", gathered_at(chosen=lambda i: i // 2)),
    "gathered_where_no_mark_is": ("gates", gathered_at(place=Tensor.argmin)),
}  # fmt: skip
