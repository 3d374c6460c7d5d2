"""Loops over tokens that hand on more than a state: the state's recurrence is the op's, and the rest stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.corpus.delta.block import PlainDelta
from tests.corpus.delta.normalisers import MADE_OF_THE_STATE, NORMALISERS
from tests.frames import check

from .contract import assert_autocast, assert_fires, assert_refused

NAME = "token_loop"


@pytest.mark.parametrize("name", NORMALISERS)
def test_spelling_in_float64(name):
    module = PlainDelta(NORMALISERS[name], state=True).double()
    assert_fires(NAME, module, module.example_inputs(4, dtype=torch.float64))


@pytest.mark.parametrize("name", ["divided", "running_maximum"])
def test_bfloat16(name):
    """With the recurrence in float32, as such code has it."""
    module = PlainDelta(NORMALISERS[name], wide=True).bfloat16()
    frames = check(module, module.example_inputs(3, dtype=torch.bfloat16))
    assert frames.counts[NAME] == 1, frames.misses


def test_autocast_around_the_call():
    module = PlainDelta(NORMALISERS["divided"])
    assert_autocast(NAME, module, module.example_inputs(3))


def test_everything_dynamic():
    module = PlainDelta(NORMALISERS["running_maximum"])
    frames = check(module, module.example_inputs(3), dynamic=True)
    assert frames.counts[NAME] == 1, frames.misses


@pytest.mark.parametrize("length", [2, 17])
def test_lengths(length):
    module = PlainDelta(NORMALISERS["divided"])
    with torch.no_grad():
        assert_fires(NAME, module, module.example_inputs(length))


def test_refuses_what_is_made_of_the_state():
    module = PlainDelta(MADE_OF_THE_STATE)
    assert_refused(NAME, "steps", module, module.example_inputs(4))


class Squashed(nn.Module):
    """A matrix state that goes through tanh, beside a mean of keys."""

    def __init__(self, width=6):
        super().__init__()
        self.projections = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.projections(x).chunk(3, -1)
        state, mean, out = x.new_zeros(len(x), x.shape[-1], x.shape[-1]), torch.zeros_like(k[:, 0]), []
        for i in range(x.shape[1]):
            mean = 0.5 * mean + k[:, i]
            state = torch.tanh(state + mean[..., None] * v[:, i, None])
            out.append((q[:, i, None] @ state).squeeze(1))
        return torch.stack(out, 1)


def test_names_what_is_handed_on_beside_another_state():
    frames = check(Squashed(), (torch.randn(2, 5, 6, requires_grad=True),))
    (miss,) = (m for m in frames.misses if m.pass_name == NAME)
    assert miss.tag == "carried" and "more than its state" in miss.reason


class TwoVectors(nn.Module):
    """A recurrent network of two vectors, as an LSTM, in heads."""

    def __init__(self, width=6):
        super().__init__()
        self.inward, self.across = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x):
        hidden, cell, out = x.new_zeros(len(x), x.shape[-1]), x.new_zeros(len(x), x.shape[-1]), []
        for i in range(x.shape[1]):
            kept, taken, shown = (self.inward(x[:, i]) + self.across(hidden)).chunk(3, -1)
            cell = kept.sigmoid() * cell + taken.tanh()
            hidden = shown.sigmoid() * cell.tanh()
            out.append(hidden)
        return torch.stack(out, 1)


def test_a_recurrent_network_of_two_vectors_is_none_of_its_business():
    frames = check(TwoVectors(), (torch.randn(2, 5, 6, requires_grad=True),))
    assert not frames.counts[NAME] and not frames.tags(NAME), frames.misses
