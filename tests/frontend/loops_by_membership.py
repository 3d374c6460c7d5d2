"""Loops over experts that ask whether an expert is among those that tokens chose: `e in indices.unique()`; and such in
which that is no question of whether it has tokens."""

from __future__ import annotations

import torch

from tests.frontend.loops_that_do_more import add


def among_distinct_choices(m, x, indices, gates):
    y, active = torch.zeros_like(x), indices.unique()
    for e in range(m.num_experts):
        if e in active:
            add(m, y, x, indices, gates, e)
    return y


def not_among_distinct_choices(m, x, indices, gates):
    y, active = torch.zeros_like(x), torch.unique(indices, sorted=False).cpu()
    for e, expert in enumerate(m.experts):
        if e not in active:
            continue
        token, choice = torch.where(indices == e)
        y[token] += expert(x[token]) * gates[token, choice, None]
    return y


def among_choices(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if e not in indices:
            continue
        add(m, y, x, indices, gates, e)
    return y


def not_idle(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        idle = not (indices == e).any().item()
        if not idle:
            add(m, y, x, indices, gates, e)
    return y


def choice_by_choice(m, x, indices, gates):
    """Each asks among its own."""
    y = torch.zeros_like(x)
    for k in range(indices.shape[-1]):
        chosen = indices[:, k]
        active = torch.unique(chosen)
        for e in range(m.num_experts):
            if e in active:
                (token,) = torch.where(chosen == e)
                y.index_add_(0, token, m.experts[e](x[token]) * gates[token, k, None])
    return y


def counted_distinct_choices(m, x, indices, gates):
    y = torch.zeros_like(x)
    active, _ = torch.unique(indices, return_counts=True)
    for e in active:
        add(m, y, x, indices, gates, e)
    return y


FUSE = (among_distinct_choices, not_among_distinct_choices, among_choices, not_idle, choice_by_choice,
        counted_distinct_choices)  # fmt: skip


# --- what stays as it is


def among_a_few_tokens(m, x, indices, gates):
    y, active = torch.zeros_like(x), indices[:2].unique()
    for e in range(m.num_experts):
        if e in active:
            add(m, y, x, indices, gates, e)
    return y


def among_first_choices(m, x, indices, gates):
    y, active = torch.zeros_like(x), indices[:, 0].unique()
    for e in range(m.num_experts):
        if e in active:
            add(m, y, x, indices, gates, e)
    return y


def another_among_choices(m, x, indices, gates):
    y, active = torch.zeros_like(x), indices.unique()
    for e in range(m.num_experts):
        if m.num_experts - 1 - e in active:
            add(m, y, x, indices, gates, e)
    return y


def only_if_not_among(m, x, indices, gates):
    """Adds nothing, ever, but to a reader's surprise: the other way round."""
    y, active = torch.zeros_like(x), indices.unique()
    for e in range(m.num_experts):
        if e not in active:
            y = y + m.experts[e](x)
    return y


def by_how_often(m, x, indices, gates):
    """An expert whose number is how often some expert was chosen."""
    y = torch.zeros_like(x)
    _, counts = torch.unique(indices, return_counts=True)
    for e in counts:
        add(m, y, x, indices, gates, e % m.num_experts)
    return y


def among_how_often(m, x, indices, gates):
    y = torch.zeros_like(x)
    _, counts = torch.unique(indices, return_counts=True)
    for e in range(m.num_experts):
        if e in counts:
            add(m, y, x, indices, gates, e)
    return y


def among_places(m, x, indices, gates):
    """Where each choice is among the distinct ones, which are other numbers where an expert has no tokens."""
    y = torch.zeros_like(x)
    _, places = torch.unique(indices, return_inverse=True)
    for e in range(m.num_experts):
        if e in places:
            add(m, y, x, indices, gates, e)
    return y


def answers_with_it(m, x, indices, gates):
    """Whether an expert is idle goes into the result."""
    y, idle = torch.zeros_like(x), 0
    for e in range(m.num_experts):
        add(m, y, x, indices, gates, e)
        if e not in indices:
            idle = idle + 1
    return y * (1 + idle)


STAY = (among_a_few_tokens, among_first_choices, another_among_choices, only_if_not_among, by_how_often,
        among_how_often, among_places, answers_with_it)  # fmt: skip
