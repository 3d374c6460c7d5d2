"""Mamba-1's scan by an associative scan is found; nothing beside it, and results and gradients stay eager's."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.selective_scans import AT_ONCE, NEAR_AT_ONCE, PlainMamba1, at_once, at_once_tokens_first
from tests.frames import check

from . import conditions
from .conditions import sampled
from .contract import assert_fires

NAME = "selective_scan"


def block(form=at_once, length=5, dtype=torch.float32, batch=2, **kwargs):
    module = PlainMamba1(form, **kwargs).to(dtype)
    return module, module.example_inputs(length, batch, dtype)


@sampled(3, "state", [False, True])
@pytest.mark.parametrize("form", AT_ONCE)
def test_spellings(form, state):
    frames = assert_fires(NAME, *block(AT_ONCE[form], state=state), dynamo=True)
    u, dt, A, B, C, D, entering, *_ = conditions.op_of(frames, NAME).args
    assert [tuple(x.meta["val"].shape) for x in (u, dt, A, B, C)] == [(2, 5, 6), (2, 5, 6), (6, 4), (2, 5, 4), (2, 5, 4)]
    assert (D, entering) == (None, None)
    assert not {n.target for n in frames.graph.graph.nodes} & {torch.ops.aten.cat.default, torch.ops.aten.stack.default}


@sampled(4, "length", [2, 3, 4, 7, 8, 33, 64])
def test_lengths(length):
    assert_fires(NAME, *block(length=length, state=True), dynamo=True)


@sampled(3, "sizes", [{"d": 1}, {"d": 5, "n": 5}, {"d": 2, "n": 2}, {"batch": 1}, {"batch": 5}], ids=str)
@pytest.mark.parametrize("form", [at_once, at_once_tokens_first])
def test_sizes(form, sizes):
    """With batch, channels, states and tokens of one size, too."""
    assert_fires(NAME, *block(form, state=True, **sizes), dynamo=True)


@sampled(3, "length", [2, 3, 4, 7, 64])
def test_bfloat16(length):
    frames = check(*block(length=length, dtype=torch.bfloat16, state=True))
    assert frames.counts[NAME] == 1, frames.misses
    assert conditions.op_of(frames, NAME).args[0].meta["val"].dtype == torch.bfloat16


def test_inference():
    module, args = block()
    with torch.no_grad():
        assert_fires(NAME, module.requires_grad_(False), tuple(a.detach() for a in args), dynamo=True)


def test_switched_off():
    from megacpp_compile.config.options import Config

    frames = check(*block(), Config(strict=True, disable=(NAME,)))
    assert NAME not in frames.counts and len(frames.graph.graph.nodes) > 40


def test_dynamic():
    """Numbers of tokens are those of the tree; a batch that is an input stays one."""
    module, args = block(length=8)
    torch._dynamo.mark_dynamic(args[0], 0)
    frames = check(module, args)
    assert frames.counts[NAME] == 1, frames.misses
    conditions.assert_serves(frames, module, module.example_inputs(8, 3))


@sampled(5, "near", NEAR_AT_ONCE)
def test_near_misses_stay(near):
    frames = check(*block(NEAR_AT_ONCE[near], state=True))
    assert not frames.counts[NAME] and not frames.counts["token_loop"]
    told = {"largest_read", "squared_when_read", "first_state_returned", "states_read_again", "no_exponential",
            "step_squared", "no_step_in_the_input", "states_of_another_token"}  # fmt: skip
    assert near not in told or frames.tags(NAME) <= {"escapes", "operands", "axes"} and frames.tags(NAME)


def test_beside_a_loop():
    """A layer of each is a site of each pass."""
    from tests.corpus.selective_scans import einsums

    module = torch.nn.Sequential(PlainMamba1(einsums), PlainMamba1(at_once))
    frames = check(module, module[0].example_inputs())
    assert (frames.counts["token_loop"], frames.counts[NAME]) == (1, 1)


def test_other_trees_are_not_told():
    """A cumulative product, as an associative scan of one tensor, is nobody's near miss."""
    from torch._higher_order_ops.associative_scan import associative_scan

    class Products(torch.nn.Module):
        def forward(self, x):
            return associative_scan(lambda a, b: a * b, x, 1, combine_mode="generic")

    assert not check(Products(), (torch.rand(2, 6, 3, 4).requires_grad_(),)).tags(NAME)
