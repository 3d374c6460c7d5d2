"""Retention and lightning attention, in chunks and as one triangle, are a scan with a step of one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.corpus.retention import FORMS, PlainRetention, blocks, one_triangle, powers_of, split_blocks, stacked_chunks
from tests.frames import check, largest_error, train

from .contract import assert_autocast, assert_dynamic, assert_fires

NAME = "ssd_scan"


def block(form, length=12, **kwargs):
    module = PlainRetention(form, **kwargs)
    return module, module.example_inputs(length)


@pytest.mark.parametrize("form", FORMS)
def test_spellings(form):
    frames = assert_fires(NAME, *block(FORMS[form]))
    kinds = {n.target for n in frames.graph.graph.nodes}
    assert not kinds & {torch.ops.aten.matmul.default, torch.ops.aten.einsum.default}, "a part stayed behind"


@pytest.mark.parametrize("form", [blocks, split_blocks, stacked_chunks], ids=lambda f: f.__name__)
def test_states_in_and_out(form):
    assert_fires(NAME, *block(form, given=True, state=True))


def test_a_last_block_that_is_shorter():
    assert_fires(NAME, *block(blocks, 10, state=True))


@pytest.mark.parametrize("form", [blocks, one_triangle], ids=lambda f: f.__name__)
def test_rates_that_learn(form):
    """Their gradients are eager's."""
    assert_fires(NAME, *block(form, learned=True))


def test_long_blocks():
    """Tables tell of their length in numbers, and the trial has to keep it."""
    module, args = block(blocks, 300, chunk=128)
    assert check(module, args, tolerance=1e-4).counts[NAME] == 1


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form):
    module = PlainRetention(FORMS[form]).bfloat16()
    assert_fires(NAME, module, module.example_inputs(dtype=torch.bfloat16))


def test_two_layers_share_no_more_than_the_slopes():
    module = nn.Sequential(PlainRetention(blocks), PlainRetention(stacked_chunks))
    assert_fires(NAME, module, module[0].example_inputs(), count=2)


class Layers(nn.Module):
    """Two layers with one pair of tables."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(PlainRetention(None) for _ in range(2))

    def forward(self, x):
        i = torch.arange(x.shape[1])
        decay = torch.exp(-self.layers[0].slopes[:, None, None] * (i[:, None] - i)).tril()
        for layer in self.layers:
            layer.form = lambda q, k, v, *_: ((q @ k.mT * decay) @ v, None)
            x = layer(x)
        return x


def test_tables_of_several_layers():
    module = Layers()
    assert_fires(NAME, module, module.layers[0].example_inputs(), count=2)


def test_inference():
    module, args = block(blocks, state=True)
    with torch.no_grad():
        assert_fires(NAME, module.requires_grad_(False), tuple(a.detach() for a in args))


@pytest.mark.parametrize("form", [split_blocks, stacked_chunks, one_triangle], ids=lambda f: f.__name__)
def test_a_second_length(form):
    module, args = block(form, 8)
    frames = check(module, args)
    args = module.example_inputs(12)
    assert largest_error(train(frames.compiled, module, args), train(module, module, args))[0] < 1e-5
    assert [a.frame.passes[NAME] for a in frames.analyses] == [1, 1], frames.misses


def test_dynamic_shapes():
    module = PlainRetention(one_triangle)
    assert_dynamic(NAME, module, module.example_inputs)


def test_autocast_around_the_call():
    assert_autocast(NAME, *block(split_blocks))


NEAR = {
    "states_read_a_token_late": partial(blocks, late=1),
    "keys_decayed_once_more": partial(blocks, key=1),
    "own_token_unseen": partial(blocks, seen=1),
    "squares_of_distances": partial(one_triangle, power=2),
    "diagonal_left_out": partial(one_triangle, diagonal=-1),
    "next_token_seen": partial(one_triangle, diagonal=1),
    "normalised_rows": partial(one_triangle, normalised=True),
    "another_order": partial(split_blocks, turn=lambda pieces: pieces[::-1]),
    "forgotten_between_chunks": partial(split_blocks, kept=0.5),
}


@pytest.mark.parametrize("near", NEAR)
def test_refuses(near):
    assert not check(*block(NEAR[near])).counts[NAME]


def test_refuses_tables_that_are_given():
    """What a buffer holds is not known when compiling."""

    class Given(PlainRetention):
        def __init__(self):
            super().__init__(None)
            i = torch.arange(12)
            self.register_buffer("table", torch.exp(-self.slopes[:, None, None] * (i[:, None] - i)).tril())
            self.form = lambda q, k, v, *_: ((q @ k.mT * self.table) @ v, None)

    module = Given()
    assert not check(module, module.example_inputs()).counts[NAME]


def test_refuses_powers_that_may_have_no_logarithm():
    frames = check(*block(powers_of(lambda s: -s)))
    assert not frames.counts[NAME] and frames.tags(NAME) == {"decay"}
    assert_fires(NAME, *block(powers_of(lambda s: torch.exp(-s))))


def test_refuses_tables_made_without_gradients_of_rates_that_learn():
    def form(q, k, v, s, size, state):
        i = torch.arange(q.shape[2])
        with torch.no_grad():
            decay = torch.exp(-s[:, None, None] * (i[:, None] - i)).tril()
        return (q @ k.mT * decay) @ v, None

    frames = check(*block(form, learned=True))
    assert not frames.counts[NAME] and frames.tags(NAME) == {"region"}
