"""Linear attention with gates, a head or a channel, is found in chunks and as one triangle."""

from __future__ import annotations

import torch

from megacpp_compile.config.options import Config
from tests.corpus.delta.block import LINEAR, Spelling
from tests.corpus.delta.linear import head_gates_states_written
from tests.corpus.delta.near_misses import band
from tests.corpus.delta.parts import causal, no_norm, repeated
from tests.frames import check_graph

from .conditions import conditions, sampled
from .contract import assert_fires
from .deltas import delta

NAME = "gated_linear_attention"
ON = Config(strict=True, passes={NAME: True})
FORMS = ("one_triangle", "channel_gates_in_the_operands")


@sampled(3, "name", FORMS)
def test_spelling(name):
    assert not assert_fires(NAME, *delta(LINEAR[name], 12), config=ON).tags("ssd_scan")


@sampled(3, "name", FORMS)
def test_states_in_and_out_in_float64(name):
    assert_fires(NAME, *delta(LINEAR[name], 8, torch.float64, given=True, state=True), config=ON)


def test_is_on_by_default():
    assert check_graph(*delta(LINEAR["one_triangle"], 12)).counts[NAME] == 1


def triangle(diagonal=0, sums=lambda g: g.cumsum(1)):
    """One triangle, without scale and state."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k, total = repeated(q, v.shape[2]), repeated(k, v.shape[2]), sums(g)
        mask = causal(v.shape[1], v, diagonal)[None, :, :, None]
        decay = (total[:, :, None] - total[:, None]).masked_fill(~mask, -torch.inf).exp()
        return torch.einsum("btsh,bshv->bthv", torch.einsum("bthk,bshk->btsh", q, k) * decay, v), None

    return Spelling(form, norm=no_norm, delta=False)


WRITTEN = Spelling(head_gates_states_written, norm=no_norm, delta=False, whole=True)
# the near misses are changes of what fires
test_conditions = conditions(
    NAME, config=ON, inference=lambda: delta(LINEAR["one_triangle"], 12, state=True),
    states_written_into_zeros=lambda: delta(WRITTEN, 12), changed_below=lambda: delta(triangle(), 12),
)


@sampled(
    5, "near",
    [triangle(-1), triangle(1), triangle(sums=lambda g: g.cumsum(1) - g), Spelling(band, norm=no_norm, delta=False)],
    ids=["token_not_seen", "next_token_seen", "decay_a_token_late", "band"],
)
def test_refuses(near):
    frames = check_graph(*delta(near, 6), ON)
    assert not frames.counts[NAME] and frames.tags("ssd_scan")


def test_few_chunks_stay_plain_on_a_cpu():
    """Unless the pass is asked for; more chunks, which take long to compile as they are, become the op."""
    form = LINEAR["channel_gates_in_the_operands"]
    for tokens, fires in ((8, False), (64, False), (68, True)):
        frames = check_graph(*delta(form, tokens))
        assert (bool(frames.counts[NAME]), "few-chunks" in frames.tags(NAME)) == (fires, not fires)
    assert check_graph(*delta(form, 8), config=ON).counts[NAME] == 1
