"""Decays by exponentials and sigmoids have logarithms where they are parts of a larger tensor, or are padded with numbers
above zero; padded with zeros they have none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.delta.block import PlainDelta, Spelling
from tests.corpus.delta.parts import no_norm

from .contract import assert_fires, assert_refused

NAME = "token_loop"


def attend(q, k, v, decays):
    """Linear attention token by token, and its last state."""
    state, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), []
    for i in range(v.shape[1]):
        state = decays[:, i, :, None, None] * state + k[:, i, ..., None] * v[:, i, :, None]
        out.append((q[:, i, :, None] @ state).squeeze(-2))
    return torch.stack(out, 1), state


def block(decays):
    """Heads whose decays `decays` makes of what the gates' and the weights' projections give."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        heads = v.shape[2] // k.shape[2]
        return attend(*(t.repeat_interleave(heads, 2) for t in (q * scale, k)), v, decays(g, beta))

    module = PlainDelta(Spelling(form, norm=no_norm), state=True)
    return module, module.example_inputs(6)


def one_of_two(g, beta):
    return torch.cat((g, beta), -1).sigmoid().chunk(2, -1)[0]


def every_second(g, beta):
    return torch.stack((beta, g), -1).exp()[..., 1]


def behind_others(g, beta):
    return torch.cat((beta, g), 2).exp()[:, :, beta.shape[2] :]


def split_and_moved(g, beta):
    return torch.cat((g, beta), -1).mT.sigmoid().split(g.shape[-1], 1)[1].mT


@pytest.mark.parametrize("decays", [one_of_two, every_second, behind_others, split_and_moved], ids=lambda f: f.__name__)
def test_parts(decays):
    assert_fires(NAME, *block(decays))


def head_after_head(q, k, v, g, beta, state, size, scale, norm):
    """As OpenLanguageModel has it: a loop for each head, over its own part of all decays."""
    heads, decays = v.shape[2] // k.shape[2], g.sigmoid()
    q, k = (t.repeat_interleave(heads, 2) for t in (q * scale, k))
    ends = [attend(*(t[:, :, h : h + 1] for t in (q, k, v)), decays[:, :, h : h + 1]) for h in range(v.shape[2])]
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*ends, strict=True), (2, 1), strict=True))


def test_a_loop_for_each_head():
    module = PlainDelta(Spelling(head_after_head, norm=no_norm), state=True)
    assert_fires(NAME, module, module.example_inputs(5), count=4)


def padded(value, **kwargs):
    """The first two tokens' decays are `value`."""
    return lambda g, beta: F.pad(g.sigmoid()[:, 2:], (0, 0, 2, 0), value=value, **kwargs)


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
        heads, out = v.shape[2] // k.shape[2], []
        q, k = (t.repeat_interleave(heads, 2) for t in (q * scale, k))
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], k.shape[-1])
        for i in range(v.shape[1]):
            b, key = beta[:, i, :, None, None], k[:, i]
            both = key[..., None] * key[..., None, :]
            state = state * (1 - b * both) + b * (q[:, i, ..., None] * key[..., None, :])
            read = (state * q[:, i, :, None]).sum(-1)
            out.append(torch.cat((read, v[:, i, ..., : v.shape[-1] - k.shape[-1]]), -1))
        return torch.stack(out, 1), state

    module = PlainDelta(Spelling(form, norm=no_norm))
    assert_refused(NAME, "roles", module, module.example_inputs(4))
