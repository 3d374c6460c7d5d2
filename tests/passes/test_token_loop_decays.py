"""Decays have logarithms where they are exponentials and sigmoids, also as parts of a larger tensor or padded with numbers
above zero, and where they are tables that the graph makes of numbers; those that are not known have none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.delta.parts import repeated

from .conditions import conditions, op_of, sampled
from .contract import assert_fires, assert_refused
from .deltas import delta, linear

NAME = "token_loop"


def attend(q, k, v, decay):
    """Linear attention token by token, and its last state; `decay(i)` is that of token i."""
    state, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), []
    for i in range(v.shape[1]):
        state = decay(i) * state + k[:, i, ..., None] * v[:, i, :, None]
        out.append((q[:, i, :, None] @ state).squeeze(-2))
    return torch.stack(out, 1), state


def by_token(decays):
    return lambda i: decays[:, i, :, None, None]


def block(decays):
    """Heads whose decays `decays` makes of what the gates' and the weights' projections give."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        return attend(repeated(q * scale, v.shape[2]), repeated(k, v.shape[2]), v, by_token(decays(g, beta)))

    return delta(form, 6, state=True)


PARTS = {
    "one_of_two": lambda g, beta: torch.cat((g, beta), -1).sigmoid().chunk(2, -1)[0],
    "every_second": lambda g, beta: torch.stack((beta, g), -1).exp()[..., 1],
    "behind_others": lambda g, beta: torch.cat((beta, g), 2).exp()[:, :, beta.shape[2] :],
    "split_and_moved": lambda g, beta: torch.cat((g, beta), -1).mT.sigmoid().split(g.shape[-1], 1)[1].mT,
}


@pytest.mark.parametrize("part", PARTS)
def test_parts(part):
    assert_fires(NAME, *block(PARTS[part]))


def head_after_head(q, k, v, g, beta, state, size, scale, norm):
    """As OpenLanguageModel has it: a loop for each head, over its own part of all decays."""
    q, k, decays = repeated(q * scale, v.shape[2]), repeated(k, v.shape[2]), g.sigmoid()
    ends = [
        attend(*(t[:, :, h : h + 1] for t in (q, k, v)), by_token(decays[:, :, h : h + 1])) for h in range(v.shape[2])
    ]
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*ends, strict=True), (2, 1), strict=True))


def padded(value):
    """The first two tokens' decays are `value`."""
    return lambda g, beta: F.pad(g.sigmoid()[:, 2:], (0, 0, 2, 0), value=value)


@pytest.mark.parametrize("value", [1.0, 0.25])
def test_padded_with_numbers_above_zero(value):
    assert_fires(NAME, *block(padded(value)))


@pytest.mark.parametrize("value", [None, 0.0, -0.5])
def test_refuses_what_is_padded_with_others(value):
    """A decay of 0 forgets all that came before it, where a logarithm padded with 0 would keep it."""
    assert_refused(NAME, "decay", *block(padded(value)))


def test_refuses_a_state_whose_rows_are_its_columns():
    """What one operand multiplied by itself decays is no delta rule, however its author calls it."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k, out = repeated(q * scale, v.shape[2]), repeated(k, v.shape[2]), []
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], k.shape[-1])
        for i in range(v.shape[1]):
            b, key = beta[:, i, :, None, None], k[:, i]
            both = key[..., None] * key[..., None, :]
            state = state * (1 - b * both) + b * (q[:, i, ..., None] * key[..., None, :])
            read = (state * q[:, i, :, None]).sum(-1)
            out.append(torch.cat((read, v[:, i, ..., : v.shape[-1] - k.shape[-1]]), -1))
        return torch.stack(out, 1), state

    assert_refused(NAME, "roles", *delta(form, 4))


def of_rates(rates, length=4, dtype=torch.float32, **kwargs):
    """Retention (arXiv:2307.08621) as a loop, with the rates that `rates` makes for so many heads."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        decay = rates(v.shape[2]).to(v.dtype)[:, None, None]
        return attend(repeated(q, v.shape[2]) * scale, repeated(k, v.shape[2]), v, lambda i: decay)

    return linear(form, length, dtype, gate=None, **kwargs)


KNOWN = {
    "powers": lambda h: 1 - 2.0 ** (-5 - torch.arange(h, dtype=torch.float64)),
    "exponentials_between": lambda h: 1 - torch.linspace(math.log(1 / 32), math.log(1 / 512), h, dtype=torch.float64).exp(),
    "exponentials_of_heads": lambda h: 1 - torch.exp(-math.log(2) * (torch.arange(h, dtype=torch.float64) + 5)),
}


@sampled(3, "name", KNOWN)
def test_tables_of_numbers_in_float64(name):
    assert op_of(assert_fires(NAME, *of_rates(KNOWN[name], dtype=torch.float64, state=True)), "ssd_scan")


test_conditions = conditions(
    NAME, a_loop_for_each_head=lambda: (*delta(head_after_head, 5, state=True), 4),
    table_in_bfloat16=lambda: of_rates(KNOWN["powers"], 3, torch.bfloat16),
)


def test_refuses_a_buffer():
    """What it holds is not known when compiling, and may change."""
    module, args = of_rates(lambda h: module.table)
    module.register_buffer("table", KNOWN["powers"](4))
    assert_refused(NAME, "decay", module, args)


def test_refuses_a_table_with_rates_that_are_not_above_zero():
    assert_refused(NAME, "decay", *of_rates(lambda h: 1.5 - 2.0 ** torch.arange(h, dtype=torch.float64)))
