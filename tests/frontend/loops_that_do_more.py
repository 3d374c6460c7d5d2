"""What looks like a loop over the experts that have tokens, and cannot be one over all: `add` is an iteration as it
should be."""

from __future__ import annotations

import contextlib
import random

import torch
import torch.nn.functional as F

from tests.frontend.loops_over_hits import add, choices_by_expert, hit, hits, named, over

OF_OTHER_LISTS = named({
    "most_tokens_first": over(lambda m, indices: (found := hit(m, indices))[torch.argsort(-found)]),
    "some_only": over(lambda m, indices: hit(m, indices)[:2]),
    "hit_by_first_choices": over(lambda m, indices: hit(m, indices[:, :1])),
    "hit_by_other_tokens": over(lambda m, indices: hit(m, indices[:2])),
    "distinct_choices_of_a_few": over(lambda m, indices: torch.unique(indices[:2])),
    "distinct_first_choices": over(lambda m, indices: torch.unique(indices[:, 0])),
    # not places among scores: there may be more of them than experts
    "distinct_numbers": over(lambda m, indices: torch.unique(indices + indices)),
    "runs_another_expert": over(hit, lambda m, e: m.num_experts - 1 - e),
})  # fmt: skip


def counts_iterations(m, x, indices, gates):
    y, n = torch.zeros_like(x), 0
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        n += 1
    return y * n


def adds_to_the_sum(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        y = y + 0.5
        add(m, y, x, indices, gates, e)
    return y


def appends(m, x, indices, gates):
    y, seen = torch.zeros_like(x), []
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        seen.append(x[0].sum())
    return y + torch.stack(seen).sum()


def counts_in_a_module(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
            m.calls = getattr(m, "calls", 0) + 1
    return y


def counts_in_a_tensor(m, x, indices, gates):
    y, aux = torch.zeros_like(x), torch.zeros(())
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        aux += 1
    return y * aux


def counts_in_a_new_tensor(m, x, indices, gates):
    y, aux = torch.zeros_like(x), torch.zeros(())
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        aux = aux + 1
    return y * aux


def adds_to_all_tokens(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
            y += m.router.weight[e]
    return y


def stops_early(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if not (indices == e).any():
            break
        add(m, y, x, indices, gates, e)
    return y


def stops_after_one(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        if e == 0:
            break
    return y


def drops_the_few(m, x, indices, gates):
    y, counts = torch.zeros_like(x), torch.bincount(indices.flatten(), minlength=m.num_experts)
    for e in range(m.num_experts):
        if counts[e] < 5:
            continue
        add(m, y, x, indices, gates, e)
    return y


def skips_by_another_expert(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == m.num_experts - 1 - e).any():
            add(m, y, x, indices, gates, e)
    return y


def or_else(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
        else:
            y += 1
    return y


def some_zeros_otherwise(m, x, indices, gates):
    """For one of an expert's parameters."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = indices == e
        if mask.any():
            token, choice = torch.where(mask)
            y.index_add_(0, token, expert(x[token]) * gates[token, choice, None])
        else:
            y[0] += 0 * expert.up.weight.sum()
    return y


def otherwise_a_name(m, x, indices, gates):
    """The other way leaves behind what is read later."""
    y, idle = torch.zeros_like(x), 0
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
        else:
            idle = idle + 1
    return y * idle


def leaves_otherwise(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            add(m, y, x, indices, gates, e)
        else:
            return y
    return y


def only_if_none(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in range(m.num_experts):
        if (indices == e).any():
            continue
        y += m.router.weight[e]
    return y


def with_dropout(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, F.dropout(m.experts[e](x[token]), 0.5) * gates[token, choice, None])
    return y


def reads_the_last(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
    return y * m.router.weight[e].sum()


def reads_the_last_rows(m, x, indices, gates):
    y, token = torch.zeros_like(x), None
    for e in range(m.num_experts):
        if (indices == e).any():
            token, choice = torch.where(indices == e)
            y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None])
    return y + x[token].sum()


def keeps_an_output(m, x, indices, gates):
    y, last = torch.zeros_like(x), x.sum()
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        last = last * 0 + y.sum()
    return y + last


def numbers_the_hits(m, x, indices, gates):
    y = torch.zeros_like(x)
    for i, e in enumerate(hits(choices_by_expert(m, indices)).flatten()):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, m.experts[i](x[token]) * gates[token, choice, None])
    return y


def by_a_generator(m, x, indices, gates):
    y, numbers = torch.zeros_like(x), iter([float(i) for i in range(1, 9)])
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        next(numbers)
    return y * next(numbers)


def in_a_generator(m, x, indices, gates):
    y, n = torch.zeros_like(x), 0

    def found():
        for e in hits(choices_by_expert(m, indices)).flatten():
            yield e + 0

    for e in found():
        add(m, y, x, indices, gates, e)
        n += 1
    return y * n


def shifts_the_list(m, x, indices, gates):
    """The entries are views of the list."""
    y, entries = torch.zeros_like(x), hits(choices_by_expert(m, indices)).flatten()
    for e in entries:
        add(m, y, x, indices, gates, e)
        entries += 1
    return y


def draws_a_number(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        random.random()
    return y


def by_a_closure(m, x, indices, gates):
    y, n = torch.zeros_like(x), 0

    def count():
        nonlocal n
        n += 1

    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        count()
    return y * n


def tries(m, x, indices, gates):
    y, n = torch.zeros_like(x), 0
    for e in hits(choices_by_expert(m, indices)).flatten():
        add(m, y, x, indices, gates, e)
        try:
            [][e]
        except IndexError:
            n = n + 1
    return y * n


def beyond_the_weights(m, x, indices, gates):
    """Choices are any numbers: the list may name an expert that is not there, at which eager fails as well."""
    y, indices = torch.zeros_like(x), indices.clone() // 1
    for e in hits(F.one_hot(indices, m.num_experts + 1).permute(2, 1, 0)):
        token, choice = torch.where(indices == e)
        y.index_add_(0, token, (x[token] @ m.router.weight[e].T) * gates[token, choice, None])
    return y


def swallows_errors(m, x, indices, gates):
    """What is left of a name where a `with` swallows an error is of the iteration before."""
    y, out = torch.zeros_like(x), x.sum()
    for e in hits(choices_by_expert(m, indices)).flatten():
        token, choice = torch.where(indices == e)
        with contextlib.suppress(ZeroDivisionError):
            1 // int(e)
            out = m.experts[e](x[token]).sum()
        y.index_add_(0, token, m.experts[e](x[token]) * gates[token, choice, None] + out)
    return y


OTHERS = (beyond_the_weights, swallows_errors, counts_iterations, adds_to_the_sum, appends, counts_in_a_module,
          counts_in_a_tensor, counts_in_a_new_tensor, adds_to_all_tokens, *OF_OTHER_LISTS, stops_early, stops_after_one,
          drops_the_few, skips_by_another_expert, or_else, otherwise_a_name, leaves_otherwise,
          only_if_none, with_dropout, reads_the_last, reads_the_last_rows, keeps_an_output, numbers_the_hits,
          by_a_generator, in_a_generator, shifts_the_list, draws_a_number, by_a_closure, tries)  # fmt: skip
