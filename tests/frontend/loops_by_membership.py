"""Loops over experts that ask whether an expert is among those that tokens chose: `e in indices.unique()`; and such in
which that is no question of whether it has tokens."""

from __future__ import annotations

import torch

from tests.frontend.loops_over_hits import add, named, over


def among(active_of, number=lambda m, e: e):
    """A loop over all experts that adds for those whose number is among `active_of(indices)`."""

    def body(m, x, indices, gates):
        y, active = torch.zeros_like(x), active_of(indices)
        for e in range(m.num_experts):
            if number(m, e) in active:
                add(m, y, x, indices, gates, e)
        return y

    return body


among_distinct_choices = among(lambda indices: indices.unique())


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


FUSE = (*named({
    "among_distinct_choices": among_distinct_choices,
    "counted_distinct_choices": over(lambda m, indices: torch.unique(indices, return_counts=True)[0]),
}), not_among_distinct_choices, among_choices, not_idle, choice_by_choice)  # fmt: skip


# --- what stays as it is


def only_if_not_among(m, x, indices, gates):
    """Adds nothing, ever, but to a reader's surprise: the other way round."""
    y, active = torch.zeros_like(x), indices.unique()
    for e in range(m.num_experts):
        if e not in active:
            y = y + m.experts[e](x)
    return y


def answers_with_it(m, x, indices, gates):
    """Whether an expert is idle goes into the result."""
    y, idle = torch.zeros_like(x), 0
    for e in range(m.num_experts):
        add(m, y, x, indices, gates, e)
        if e not in indices:
            idle = idle + 1
    return y * (1 + idle)


STAY = (*named({
    "among_a_few_tokens": among(lambda indices: indices[:2].unique()),
    "among_first_choices": among(lambda indices: indices[:, 0].unique()),
    "another_among_choices": among(lambda indices: indices.unique(), lambda m, e: m.num_experts - 1 - e),
    # an expert whose number is how often some expert was chosen
    "by_how_often": over(lambda m, i: torch.unique(i, return_counts=True)[1], lambda m, e: e % m.num_experts),
    "among_how_often": among(lambda indices: torch.unique(indices, return_counts=True)[1]),
    # where each choice is among the distinct ones, which are other numbers where an expert has no tokens
    "among_places": among(lambda indices: torch.unique(indices, return_inverse=True)[1]),
}), only_if_not_among, answers_with_it)  # fmt: skip
