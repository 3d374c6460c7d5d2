"""Retention and lightning attention, in chunks and as one triangle, are a scan with a step of one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from megacpp_compile.matchers.ssd import constant_rates_proof
from tests.corpus.retention import FORMS, PlainRetention, blocks, of_distances, one_triangle, powers_of, split_blocks
from tests.frames import check, check_graph

from .conditions import assert_serves, conditions, sampled
from .contract import assert_dynamic, assert_fires

NAME = "ssd_scan"


def block(form, length=12, dtype=torch.float32, **kwargs):
    module = PlainRetention(form, **kwargs).to(dtype)
    return module, module.example_inputs(length, dtype)


def of_any_length(module):
    return module, module.example_inputs


@pytest.mark.parametrize("form", FORMS)
def test_spellings(form):
    frames = assert_fires(NAME, *block(FORMS[form]))
    kinds = {n.target for n in frames.graph.graph.nodes}
    assert not kinds & {torch.ops.aten.matmul.default, torch.ops.aten.einsum.default}, "a part stayed behind"


def plain(s, d):
    return torch.exp(-s * d).tril()


DISTANCES = {
    "plain": of_distances(plain),
    "absolute": of_distances(lambda s, d: torch.exp(-s * d.abs()) * (d >= 0)),
    "clamped": of_distances(lambda s, d: (torch.exp(-s) ** d.clamp(min=0)).tril()),
    "rectified": of_distances(lambda s, d: torch.where(d >= 0, torch.exp(-s * d.float().relu()), 0.0)),
    "divided": of_distances(plain, lambda q, k: torch.einsum("bhik,bhjk->bhij", q, k) / 3),
}


@pytest.mark.parametrize("form", DISTANCES)
def test_tables_of_distances(form):
    """What keeps a table finite where a mask forgets it, and scores multiplied before they decay."""
    assert_fires(NAME, *block(DISTANCES[form]))


@pytest.mark.parametrize("form", ["plain", "absolute", "clamped"])
def test_tables_of_distances_of_any_length(form):
    assert_dynamic(NAME, PlainRetention(DISTANCES[form]), PlainRetention(None).example_inputs)


def test_long_blocks():
    """Tables tell of their length in numbers, and the trial has to keep it."""
    module, args = block(blocks, 300, chunk=128)
    assert check_graph(module, args, tolerance=1e-4).counts[NAME] == 1


@sampled(3, "form", FORMS)
def test_bfloat16(form):
    assert_fires(NAME, *block(FORMS[form], dtype=torch.bfloat16))


@sampled(3, "form", ["split_blocks", "stacked_chunks", "one_triangle"])
def test_a_second_length(form):
    module, args = block(FORMS[form], 8)
    frames = check(module, args)
    assert_serves(frames, module, module.example_inputs(12), graphs=2)
    assert [a.frame.passes[NAME] for a in frames.analyses] == [1, 1], frames.misses


class Scaled(PlainRetention):
    """Scores are multiplied by a float of the module, which `dynamic=True` makes an input, before they decay."""

    def __init__(self, scale=0.7):
        super().__init__(of_distances(plain, self.scores))
        self.scale = scale

    def scores(self, q, k):
        return (q @ k.mT) * self.scale


class TwoLayers(nn.Module):
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


# everything: a number of the module is among the scores; rates that learn have eager's gradients
test_conditions = conditions(
    NAME, inference=lambda: block(blocks, state=True), autocast=lambda: block(split_blocks),
    length=lambda: of_any_length(PlainRetention(one_triangle)), everything=lambda: of_any_length(Scaled()),
    **{f"states_{n}": partial(block, FORMS[n], given=True, state=True) for n in FORMS if n != "one_triangle"},
    **{f"rates_that_learn_{f.__name__}": partial(block, f, learned=True) for f in (blocks, one_triangle)},
    last_block_is_shorter=lambda: block(blocks, 10, state=True),
    tables_of_two_layers=lambda: (TwoLayers(), block(None)[1], 2),
    two_layers=lambda: (nn.Sequential(*(PlainRetention(f) for f in (blocks, FORMS["stacked_chunks"]))), block(None)[1], 2),
)


@pytest.mark.end_to_end
def test_another_number_of_the_module_is_compiled_anew():
    module = Scaled()
    frames = check(module, module.example_inputs(5), dynamic=True)
    for module.scale in (0.7, 0.3):
        assert_serves(frames, module, module.example_inputs(9), graphs=None)
    assert len(frames.graphs) == 2 and frames.counts[NAME] == 2


def test_a_number_beside_the_scores_is_no_scale():
    """What is added to scores is none of a linear attention's."""
    module = Scaled()
    module.form = of_distances(plain, lambda q, k: q @ k.mT + module.scale)
    assert not check(module, module.example_inputs(8), dynamic=True).counts[NAME]


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


# Distances that bend elsewhere than at 0, where a trial of few tokens does not get.


BENT = {
    "both_ways": lambda s, d: torch.exp(-s * d.abs()),
    "at_most_20": lambda s, d: torch.exp(-s * d.clamp(min=0, max=20)).tril(),
    "at_most_20_from_behind": lambda s, d: torch.exp(s * (-d).clamp(min=-20)).tril(),
    "at_most_20_by_relu": lambda s, d: torch.exp(-s * (20 - (20 - d).relu())).tril(),
    "back_from_20": lambda s, d: torch.exp(-s * (20 - (20 - d).abs())).tril(),
    "back_from_20_on": lambda s, d: torch.exp(-s * (20 - (d - 20).abs())).tril(),
    "no_more_than_20": lambda s, d: torch.exp(-s * (d - (d - 20).relu())).tril(),
    "none_up_to_20": lambda s, d: torch.exp(-s * (d - 20).clamp(min=0)).tril(),
    "at_least_1": lambda s, d: torch.exp(-s * d.clamp(min=1)).tril(),
}


@pytest.mark.parametrize("near", BENT)
def test_refuses_distances_that_bend_elsewhere(near):
    frames = check_graph(*block(of_distances(BENT[near]), 30))
    assert not frames.counts[NAME] and "internal-error" not in frames.tags(NAME)


@sampled(3, "near", NEAR)
def test_refuses(near):
    assert not check_graph(*block(NEAR[near])).counts[NAME]


def test_refuses_tables_that_are_given():
    """What a buffer holds is not known when compiling."""
    module, args = block(None)
    i = torch.arange(12)
    module.register_buffer("table", torch.exp(-module.slopes[:, None, None] * (i[:, None] - i)).tril())
    module.form = lambda q, k, v, *_: ((q @ k.mT * module.table) @ v, None)
    assert not check_graph(module, args).counts[NAME]


def test_what_goes_wrong_behind_the_first_tokens():
    """A state is lost behind a chunk, which is longer than what is looked at first."""
    module, args = block(split_blocks, 96, chunk=32)
    assert check_graph(module, args, tolerance=1e-4).counts[NAME] == 1
    assert not check_graph(*block(partial(split_blocks, kept=0.5), 96, chunk=32), tolerance=1e-4).counts[NAME]


def test_readings_that_fail_cost_little(monkeypatch):
    """Which operand is which is tried on a few tokens of a few sequences; what stands there is tried whole, twice."""
    sizes, recurrence = list[int](), constant_rates_proof.gated_linear_attention

    def counted(q, *rest):
        sizes.append(q.numel())
        return recurrence(q, *rest)

    monkeypatch.setattr(constant_rates_proof, "gated_linear_attention", counted)
    module, args = block(blocks, 512, chunk=64)
    assert check_graph(module, args, tolerance=1e-4).counts[NAME] == 1
    assert len(sizes) > 6 and sum(n > 512 for n in sizes) == 2


class BlocksOfBuffers(PlainRetention):
    """Blocks one after the other, with tables that are buffers (MiniMax in transformers) or made in forward; `masked`
    multiplies keys by a mask of padding."""

    def __init__(self, buffers=True, masked=False, late=0):
        super().__init__(self.blocks)
        self.masked, self.late = masked, late
        self.names = ("inner", "left", "triangle")
        for name, table in zip(self.names, self.tables() if buffers else (None,) * 3, strict=True):
            self.register_buffer(name, table)

    def tables(self):
        i, s = torch.arange(self.chunk), self.slopes[:, None, None]
        inner = torch.exp(-s * (i[:, None] + 1 + self.late))
        return inner, torch.exp(-s * (self.chunk - 1 - i[:, None])), torch.exp(-s * (i[:, None] - i)).tril()

    def blocks(self, q, k, v, s, size, state):
        inner, left, triangle = [getattr(self, n) for n in self.names] if self.inner is not None else self.tables()
        kv, out = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        if self.masked:
            k = k * self.mask[:, None, :, None]
        for start in range(0, q.shape[2], size):
            q_i, k_i, v_i = (x[:, :, start : start + size] for x in (q, k, v))
            out.append((q_i * inner) @ kv + (q_i @ k_i.mT * triangle) @ v_i)
            kv = kv * torch.exp(-s[:, None, None] * size) + (k_i * left).mT @ v_i
        return torch.cat(out, 2), kv

    def forward(self, x, mask=None):
        self.mask = mask
        return super().forward(x)


def test_tables_in_buffers_are_a_near_miss():
    module = BlocksOfBuffers()
    frames = check_graph(module, module.example_inputs())
    assert not frames.counts[NAME] and frames.tags(NAME) == {"given-decays"}
    module = BlocksOfBuffers(buffers=False)  # what it says to do
    assert_fires(NAME, module, module.example_inputs())


def test_a_mask_of_padding_is_no_table():
    module = BlocksOfBuffers(buffers=False, masked=True, late=1)
    frames = check_graph(module, (*module.example_inputs(), torch.tensor([[1.0] * 12, [0.0] * 4 + [1.0] * 8])))
    assert not frames.counts[NAME] and "given-decays" not in frames.tags(NAME)


def test_refuses_powers_that_may_have_no_logarithm():
    frames = check_graph(*block(powers_of(lambda s: -s)))
    assert not frames.counts[NAME] and frames.tags(NAME) == {"decay"}
    assert_fires(NAME, *block(powers_of(lambda s: torch.exp(-s))))


def test_refuses_tables_made_without_gradients_of_rates_that_learn():
    def form(q, k, v, s, size, state):
        i = torch.arange(q.shape[2])
        with torch.no_grad():
            decay = torch.exp(-s[:, None, None] * (i[:, None] - i)).tril()
        return (q @ k.mT * decay) @ v, None

    frames = check_graph(*block(form, learned=True))
    assert not frames.counts[NAME] and frames.tags(NAME) == {"region"}
