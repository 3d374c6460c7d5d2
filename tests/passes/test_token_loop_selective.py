"""Mamba-1's scan as a loop over tokens is found in any spelling; nothing beside it, and results and gradients stay
eager's."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.selective_scans import FORMS, NEAR, PlainMamba1, as_transformers, einsums, within
from tests.frames import check_graph

from . import conditions
from .conditions import sampled
from .contract import assert_fires
from .deltas import fires_dynamic

NAME, OP = "token_loop", "selective_scan"


def block(form=as_transformers, length=5, dtype=torch.float32, batch=2, **kwargs):
    module = PlainMamba1(form, **kwargs).to(dtype)
    return module, module.example_inputs(length, batch, dtype)


def fires(form, **kwargs):
    return conditions.op_of(assert_fires(NAME, *block(form, **kwargs)), OP)


@sampled(3, "given", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_spellings(form, given):
    frames = assert_fires(NAME, *block(FORMS[form], given=given, state=given))
    targets = {n.target for n in frames.graph.graph.nodes}
    assert not targets & {torch.ops.aten.einsum.default, torch.ops.aten.select.int, torch.ops.aten.stack.default}
    assert (conditions.op_of(frames, OP).args[6] is not None) == given


def test_operands_are_those_of_the_model():
    """Not repeated, not cast, and none of a token's own."""
    u, dt, A, B, C, D, state, chunk, dtype = fires(as_transformers, dtype=torch.bfloat16).args
    assert [tuple(x.meta["val"].shape) for x in (u, dt, A, B, C)] == [(2, 5, 6), (2, 5, 6), (6, 4), (2, 5, 4), (2, 5, 4)]
    assert u.meta["val"].dtype == B.meta["val"].dtype == torch.bfloat16 and A.meta["val"].dtype == torch.float32
    assert (D, state) == (None, None)


def test_skip_within_is_the_ops():
    assert fires(within).args[5] is not None


@pytest.mark.parametrize("length", [2, 3, 40])
def test_lengths(length):
    with torch.no_grad():
        fires(einsums, length=length)


@sampled(3, "sizes", [{"d": 1}, {"n": 1}, {"d": 5, "n": 5}, {"d": 2, "n": 2}, {"batch": 1}, {"batch": 6}], ids=str)
def test_sizes(sizes):
    """With batch, channels, states and tokens of one size, too."""
    form = as_transformers
    frames = check_graph(*block(form, **sizes))
    assert frames.counts[NAME] == (sizes.get("n") != 1), frames.misses


test_conditions = conditions.conditions(
    NAME, disabled=block, inference=lambda: block(given=True, state=True), autocast=lambda: block(within),
    bfloat16=lambda: block(dtype=torch.bfloat16), float64=lambda: block(dtype=torch.float64, state=True),
    one_sequence=lambda: block(batch=1),
)


@pytest.mark.parametrize("form", [as_transformers, within])
def test_everything_dynamic(form):
    fires_dynamic(NAME, *block(form))


def test_two_layers_share_a_graph():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([PlainMamba1(as_transformers), PlainMamba1(einsums)])

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    assert_fires(NAME, Two(), PlainMamba1().example_inputs(), 2)


@sampled(5, "near", NEAR)
def test_near_misses_stay(near):
    """Whatever fires beside it, no selective scan does, and results are eager's."""
    module, args = block(NEAR[near], given=True, state=True)
    frames = check_graph(module, args)
    assert not [n for g in frames.graphs for n in g.graph.nodes if "selective_scan" in str(n.target)]
