"""Loops over tokens whose first step has no state are found, where that is the step of a state of 0, and loops that hand on
more than a state, whose recurrence is the op's while the rest stays; results and gradients stay eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.corpus.delta.first_steps import FIRST_STEPS, OTHER_FIRST_STEPS, of_another_token
from tests.corpus.delta.normalisers import MADE_OF_THE_STATE, NORMALISERS
from tests.corpus.scans_by_token import from_none
from tests.frames import check_graph

from .conditions import conditions, sampled
from .contract import assert_autocast, assert_fires, assert_refused
from .deltas import delta, fires_dynamic, scan

NAME = "token_loop"


@sampled(5, "name", FIRST_STEPS)
def test_spelling_in_float64(name):
    frames = assert_fires(NAME, *delta(FIRST_STEPS[name], 4, torch.float64, state=True))
    (node,) = (n for n in frames.graph.graph.nodes if str(n.target).startswith("megacpp"))
    assert torch.ops.aten.select.int not in {n.target for n in frames.graph.graph.nodes if node in n.all_input_nodes}


@sampled(5, "length", [2, 17])
@pytest.mark.parametrize("name", ["delta_from_none", "linear_from_the_first_product"])
def test_lengths(name, length):
    with torch.no_grad():
        assert_fires(NAME, *delta(FIRST_STEPS[name], length, state=True))


BFLOAT16 = {"delta_from_the_number": False, "gates_within_the_steps": False, "delta_from_none": True}


@sampled(3, ("name", "wide"), BFLOAT16.items())
def test_bfloat16(name, wide):
    """Gates are float32: what the first token adds is bfloat16 alone, and the states behind it are not."""
    frames = check_graph(*delta(FIRST_STEPS[name], 3, torch.bfloat16, wide=wide))
    assert frames.counts[NAME] == 1, frames.misses


@sampled(3, "name", ["delta_from_none", "linear_from_none", "linear_from_the_first_product"])
def test_autocast_around_the_call(name):
    assert_autocast(NAME, *delta(FIRST_STEPS[name]))


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["delta_from_none", "rate_from_the_number"])
def test_everything_dynamic(name):
    fires_dynamic(NAME, *delta(FIRST_STEPS[name]))


@sampled(3, "name", OTHER_FIRST_STEPS)
def test_refuses_other_first_steps(name):
    assert_refused(NAME, "steps", *delta(OTHER_FIRST_STEPS[name], 4, state=True))


def test_a_first_state_of_another_token_is_none():
    outcome = check_graph(*delta(of_another_token, 4, state=True))
    assert not outcome.counts[NAME], outcome.counts


def test_scan_in_float64():
    def form(x, dt, A, *others):
        return from_none(x, dt, A.double(), *others)

    assert_fires(NAME, *scan(form, 4, torch.float64, state=True))


@sampled(5, "name", NORMALISERS)
def test_normalisers_in_float64(name):
    assert_fires(NAME, *delta(NORMALISERS[name], 4, torch.float64, state=True))


@pytest.mark.parametrize("name", ["divided", "running_maximum"])
def test_normalisers_in_bfloat16(name):
    """With the recurrence in float32, as such code has it."""
    frames = check_graph(*delta(NORMALISERS[name], 3, torch.bfloat16, wide=True))
    assert frames.counts[NAME] == 1, frames.misses


test_conditions = conditions(NAME, autocast=lambda: delta(NORMALISERS["divided"]))


@pytest.mark.end_to_end
def test_normalisers_everything_dynamic():
    fires_dynamic(NAME, *delta(NORMALISERS["running_maximum"]))


@pytest.mark.parametrize("length", [2, 17])
def test_lengths_of_normalisers(length):
    with torch.no_grad():
        assert_fires(NAME, *delta(NORMALISERS["divided"], length))


def test_refuses_what_is_made_of_the_state():
    assert_refused(NAME, "steps", *delta(MADE_OF_THE_STATE, 4))


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
    frames = check_graph(Squashed(), (torch.randn(2, 5, 6, requires_grad=True),))
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
    frames = check_graph(TwoVectors(), (torch.randn(2, 5, 6, requires_grad=True),))
    assert not frames.counts[NAME] and not frames.tags(NAME), frames.misses
