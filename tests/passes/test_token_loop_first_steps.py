"""Loops over tokens whose first step has no state are found, where that is the step of a state of 0; results and gradients
stay eager's."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.delta.block import PlainDelta
from tests.corpus.delta.first_steps import FIRST_STEPS, OTHER_FIRST_STEPS, of_another_token
from tests.corpus.scans import PlainMamba2
from tests.corpus.scans_by_token import from_none
from tests.frames import check, passed

from .contract import assert_autocast, assert_fires, assert_refused_in_a_graph

NAME = "token_loop"


def block(spelling="delta_from_none", length=4, **kwargs):
    module = PlainDelta(FIRST_STEPS[spelling], **kwargs)
    return module, module.example_inputs(length)


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_spelling_in_float64(name):
    module = PlainDelta(FIRST_STEPS[name], state=True).double()
    frames = assert_fires(NAME, module, module.example_inputs(4, dtype=torch.float64))
    (node,) = (n for n in frames.graph.graph.nodes if str(n.target).startswith("megacpp"))
    assert torch.ops.aten.select.int not in {n.target for n in frames.graph.graph.nodes if node in n.all_input_nodes}


@pytest.mark.parametrize("length", [2, 17])
@pytest.mark.parametrize("name", ["delta_from_none", "linear_from_the_first_product"])
def test_lengths(name, length):
    with torch.no_grad():
        assert_fires(NAME, *block(name, length, state=True))


@pytest.mark.parametrize(
    ("name", "wide"),
    [("delta_from_the_number", False), ("gates_within_the_steps", False), ("delta_from_none", True)],
)
def test_bfloat16(name, wide):
    """Gates are float32: what the first token adds is bfloat16 alone, and the states behind it are not."""
    module = PlainDelta(FIRST_STEPS[name], wide=wide).bfloat16()
    frames = check(module, module.example_inputs(3, dtype=torch.bfloat16))
    assert frames.counts[NAME] == 1, frames.misses


@pytest.mark.parametrize("name", ["delta_from_none", "linear_from_none", "linear_from_the_first_product"])
def test_autocast_around_the_call(name):
    assert_autocast(NAME, *block(name, 3))


@pytest.mark.parametrize("name", ["delta_from_none", "rate_from_the_number"])
def test_everything_dynamic(name):
    frames = check(*block(name, 3), dynamic=True)
    assert frames.counts[NAME] == 1, frames.misses


@pytest.mark.parametrize("name", OTHER_FIRST_STEPS)
def test_refuses_other_first_steps(name):
    module = PlainDelta(OTHER_FIRST_STEPS[name], state=True)
    assert_refused_in_a_graph(NAME, "steps", module, module.example_inputs(4))


def test_a_first_state_of_another_token_is_none():
    module = PlainDelta(of_another_token, state=True)
    outcome = passed(module, module.example_inputs(4))
    assert not outcome.counts[NAME], outcome.counts


def test_scan_in_float64():
    def form(x, dt, A, B, C, D, state, size):
        return from_none(x, dt, A.double(), B, C, D, state, size)

    module = PlainMamba2(form, state=True).double()
    assert_fires(NAME, module, tuple(a.detach().double().requires_grad_() for a in module.example_inputs(4)))
