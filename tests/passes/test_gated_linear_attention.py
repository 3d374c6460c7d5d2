"""Linear attention with gates is found in chunks and as one triangle, where the pass is asked for."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.config.options import Config
from tests.corpus.delta.block import LINEAR, PlainDelta, Spelling
from tests.corpus.delta.linear import head_gates_states_written
from tests.corpus.delta.near_misses import band
from tests.corpus.delta.parts import causal, no_norm, repeated
from tests.frames import check

from .contract import assert_fires

NAME = "gated_linear_attention"
ON = Config(strict=True, passes={NAME: True})
FORMS = ("one_triangle", "channel_gates_in_the_operands")


def block(spelling, length=12, **kwargs):
    module = PlainDelta(spelling, **kwargs)
    return module, module.example_inputs(length)


@pytest.mark.parametrize("name", FORMS)
def test_spelling(name):
    frames = assert_fires(NAME, *block(LINEAR[name]), config=ON)
    assert not frames.tags("ssd_scan")


@pytest.mark.parametrize("name", FORMS)
def test_states_in_and_out_in_float64(name):
    module = PlainDelta(LINEAR[name], given=True, state=True).double()
    assert_fires(NAME, module, module.example_inputs(8, dtype=torch.float64), config=ON)


def test_states_that_are_written_into_zeros():
    spelling = Spelling(head_gates_states_written, norm=no_norm, delta=False, whole=True)
    assert_fires(NAME, *block(spelling), config=ON)


def test_inference():
    module, args = block(LINEAR["one_triangle"], state=True)
    with torch.no_grad():
        assert_fires(NAME, module.requires_grad_(False), tuple(a.detach() for a in args), config=ON)


def test_is_off_by_default_and_told_by_ssd_scan():
    frames = check(*block(LINEAR["one_triangle"]))
    assert not frames.counts[NAME] and "no-step" in frames.tags("ssd_scan")


def triangle(diagonal=0, sums=lambda g: g.cumsum(1)):
    """One triangle, without scale and state."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k, total = repeated(q, v.shape[2]), repeated(k, v.shape[2]), sums(g)
        mask = causal(v.shape[1], v, diagonal)[None, :, :, None]
        decay = (total[:, :, None] - total[:, None]).masked_fill(~mask, -torch.inf).exp()
        return torch.einsum("btsh,bshv->bthv", torch.einsum("bthk,bshk->btsh", q, k) * decay, v), None

    return Spelling(form, norm=no_norm, delta=False)


def test_the_near_misses_are_changes_of_what_fires():
    assert_fires(NAME, *block(triangle()), config=ON)


@pytest.mark.parametrize(
    "near",
    [triangle(-1), triangle(1), triangle(sums=lambda g: g.cumsum(1) - g), Spelling(band, norm=no_norm, delta=False)],
    ids=["token_not_seen", "next_token_seen", "decay_a_token_late", "band"],
)
def test_refuses(near):
    frames = check(*block(near, 6), ON)
    assert not frames.counts[NAME] and frames.tags("ssd_scan")
