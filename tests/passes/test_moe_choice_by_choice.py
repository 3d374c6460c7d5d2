"""Experts whose weights are copied for each row: a token's choices one after the other, or a row for each choice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.frames import check_graph

from . import experts, experts_at_once, experts_decoding
from .contract import assert_dynamic, assert_fires, assert_half_precision, assert_refused
from .experts import CHOICES, DIM, EXPERTS, HIDDEN, MoE, by_name
from .experts_choice_by_choice import APART, NEAR, ROWS, SUMS, by_sum, einsums, products_in_place, weighted_rows


def tokens(count=11):
    return (torch.randn(count, DIM).requires_grad_(),)


def layer(body, **kwargs):
    return MoE(body, stacked=True, **kwargs)


# Sums over choices are one layer each, and experts of rows whatever becomes of them: also where no gate for each choice
# multiplies what they make.
ONE_LAYER = SUMS | ROWS | by_name(experts.batched_with_gates_of_experts, experts_at_once.scaled_at_both_ends)


@pytest.mark.parametrize("name", ONE_LAYER)
def test_one_layer(name):
    assert not assert_fires("moe", layer(ONE_LAYER[name]), tokens()).misses


@pytest.mark.parametrize("shape", [(2, 5, DIM), (1, 1, DIM)], ids=str)
def test_rows_with_a_dimension_behind_their_channels(shape):
    """Regression: what `bmm` reads was taken for rows of one channel, and the frame was lost, also with gates."""
    for body in (experts_decoding.another_scale_for_the_channels, experts_decoding.a_gate_for_the_channels):
        assert_fires("moe", layer(body, choices=1), (torch.randn(shape).requires_grad_(),))


@pytest.mark.parametrize("name", APART)
def test_other_sums_are_of_two_layers(name):
    assert_fires("moe", layer(APART[name]), tokens(), count=2)


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name):
    """What is trained is among the inputs: activations that ask for a gradient do not pass for weights."""
    tag, body = NEAR[name]
    assert {miss.tag for miss in assert_refused("moe", tag, layer(body), tokens()).misses} <= {tag, "unread"}


@pytest.mark.end_to_end
@pytest.mark.parametrize("body", [einsums, weighted_rows], ids=lambda f: f.__name__)
def test_dynamic_shapes(body):
    assert_dynamic("moe", layer(body), tokens)
    assert_dynamic("moe", layer(body), tokens, everything=True)


def test_half_precision():
    x = torch.randn(512, DIM, dtype=torch.bfloat16).requires_grad_()
    assert_half_precision("moe", layer(einsums).bfloat16(), (x,))


def test_inference():
    frames = check_graph(layer(products_in_place).requires_grad_(False), (torch.randn(11, DIM),))
    assert frames.counts["moe"] == 1


class Biased(nn.Module):
    """Experts with biases, and choices from the first to the last of three."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(torch.randn(EXPERTS, *s) / 3) for s in ((2 * HIDDEN, DIM), (DIM, HIDDEN)))
        self.b_up, self.b_down = (nn.Parameter(torch.randn(EXPERTS, n)) for n in (2 * HIDDEN, DIM))
        self.router = nn.Linear(DIM, EXPERTS)

    def forward(self, x):
        gates, indices = self.router(x).topk(EXPERTS)
        y = torch.zeros_like(x)
        for k in range(EXPERTS):
            ids = indices[:, k]
            gate, up = ((self.gate_up[ids] @ x[..., None]).squeeze(-1) + self.b_up[ids]).chunk(2, -1)
            out = (self.down[ids] @ (gate.relu() * up)[..., None]).squeeze(-1) + self.b_down[ids]
            y = y + out * gates[:, k].sigmoid().unsqueeze(-1)
        return y


def test_gates_of_their_own_function():
    """The sigmoid of a choice's score is no column of anything: each choice is a layer by itself."""
    assert_fires("moe", Biased(), tokens(), count=EXPERTS)


def test_some_of_the_choices():
    """Two of three columns: each is a layer of its own."""
    assert_fires("moe", layer(by_sum, choices=EXPERTS), tokens(), count=CHOICES)
