"""Chunked gated delta rules are found however they are written, and nothing beside them; results stay eager's."""

from __future__ import annotations

from functools import partial

import expecttest
import pytest
import torch

from megacpp_compile.config.options import Config
from megacpp_compile.matchers.delta_rule import proof
from megacpp_compile.matchers.delta_rule.proof import recurrence
from megacpp_compile.matchers.delta_rule.rule import DeltaRule, find_delta_rules
from megacpp_compile.matchers.delta_rule.verdicts import Verdicts
from megacpp_compile.passes._rewrites.arrange import gated_chunk_size
from tests.corpus.delta.block import CHUNKED, LINEAR, TOKENS, Spelling
from tests.corpus.delta.chunked import chunk_after_chunk, padded_into_zeros
from tests.corpus.delta.near_misses import NEAR_DELTA_RULES, NEAR_LINEAR, in_chunks_of, one_doubling_less
from tests.corpus.delta.parts import by_rows_in_place, by_solving, no_norm, repeated, times_rsqrt
from tests.frames import check, check_graph, render, run

from .conditions import conditions, sampled
from .contract import assert_fires, assert_refused
from .deltas import delta

NAME = "gated_delta_rule"
# Why near misses are none, beside those whose results differ. The loops over tokens below do not get as far as that.
TAGS = {
    "left_is_entered": "escapes", "state_decays_twice": "escapes",
    **dict.fromkeys(("keys_meet_queries", "values_of_another_chunk", "read_before_the_update",
                     "decayed_after_the_correction", "all_forgotten", "corrected_by_the_query",
                     "weight_on_the_value_alone"), "roles"),
    **dict.fromkeys(("state_clamped", "state_gated_by_itself", "state_squashed", "state_of_unit_rows",
                     "state_within_a_norm", "state_of_unit_mean"), "op"),
}
SILENT = {name: NEAR_DELTA_RULES[name] for name in ("squashed", "state_normed")}


def block(spelling=CHUNKED["whole_sequence"], length=8, **kwargs):
    return delta(spelling, length, **kwargs)


def near(form):
    return block(Spelling(form), given=True, state=True)


def test_graph():
    frames = assert_fires(NAME, *block(CHUNKED["rows_in_place"], length=10, given=True, state=True), dynamo=True)
    (line,) = (line for line in render(frames.graph).splitlines() if "megacpp.gated_delta_rule" in line)
    expecttest.assert_expected_inline(line, """gated_delta_rule: (f32[2, 10, 4, 5], f32[2, 4, 3, 5], f32[2, 1, 4, 3, 5], f32[2, 10, 4, 16]) = megacpp.gated_delta_rule(view, view_1, permute, permute_1, permute_2, state, None, 0.577350269189626, 1e-06, 16, float32)""")


@sampled(9, "name", CHUNKED)
def test_spellings(name):
    """Every other one with states in and out, which costs as long again. In float64: what a spelling rounds is its own."""
    given = list(CHUNKED).index(name) % 2 == 1
    frames = assert_fires(NAME, *block(CHUNKED[name], dtype=torch.float64, given=given, state=given))
    assert not {n.target for n in frames.graph.graph.nodes} & {torch.ops.aten.cumsum.default}, "a part stayed behind"


@pytest.mark.end_to_end
def test_as_many_chunks_as_blocks_of_one():
    """What two loops take apart alike are two dimensions."""
    assert_fires(NAME, *block(CHUNKED["blocks"], given=True, state=True))
    assert_refused(NAME, "roles", *block(Spelling(NEAR_DELTA_RULES["values_of_another_chunk"])))


@sampled(5, "length", [3, 4, 10])
@pytest.mark.parametrize("name", ["rows_in_place", "channel_gates"])
def test_lengths(name, length):
    """Padded or not, in one chunk or in several."""
    assert_fires(NAME, *block(CHUNKED[name], length, given=True, state=True))


@sampled(5, "sizes", [{"groups": 1}, {"groups": 4}, {"width": 5}, {"strength": 2}], ids=str)
def test_sizes(sizes):
    assert_fires(NAME, *block(**sizes))


@sampled(5, "name", [*TOKENS, "solved_to_an_inverse", "channel_gates_split", "whole_sequence"])
def test_a_single_token_is_known_and_stays_plain(name):
    """As in decoding. Nothing is amiss: the report says what it is, and no pass has a near miss."""
    module, args = block({**CHUNKED, **TOKENS}[name], length=1, given=True, state=True)
    with torch.no_grad():
        frames = check(module.requires_grad_(False), tuple(a.detach() for a in args))
    (analysis,) = frames.analyses
    assert not frames.fired and not frames.misses
    assert [found["kind"] for found in analysis.frame.recognised] == ["one token of a delta rule"]


@sampled(3, "name", ["rows_in_place", "solved_from_the_right"])
def test_a_single_token_that_is_padded_to_a_chunk(name):
    assert_fires(NAME, *block(CHUNKED[name], length=1, given=True, state=True))


def test_bfloat16():
    assert run(*block(CHUNKED["rows_in_place"], 12, dtype=torch.bfloat16)).counts[NAME] == 1


test_conditions = conditions(
    NAME, disabled=block, autocast=block, autocast_inside=block, inference=lambda: block(given=True, state=True)
)


@pytest.mark.parametrize("reads", [2, 3])
def test_a_result_that_is_cast_more_than_once(reads):
    """As by a norm in a wider dtype, in which each mention of its operand is a cast."""

    def form(*operands):
        o, state = chunk_after_chunk(*operands)
        wide = [o.double() for _ in range(reads)]
        norm = torch.rsqrt(wide[1].square().mean(-1, keepdim=True) + 1e-6)
        return (wide[0] * norm + (wide[2] if reads > 2 else 0)).to(o.dtype), state

    assert_fires(NAME, *block(Spelling(form), given=True, state=True))


@pytest.mark.parametrize("model", [0, 1, 16, 20, 64, 256])
def test_chunk_size_is_one_the_op_takes(model):
    assert gated_chunk_size(model) in (16, 32, 64)


def test_compiling_draws_no_random_numbers():
    captured = run(*block(), Config(strict=True, disable=(NAME,))).analyses[0].captured
    before = torch.get_rng_state()
    (rule,) = find_delta_rules(captured.gm.graph)
    assert isinstance(rule, DeltaRule)
    assert torch.equal(torch.get_rng_state(), before)


@sampled(5, "name", sorted(NEAR_DELTA_RULES.keys() - SILENT.keys()))
def test_refuses(name):
    """Another function of the same operands."""
    assert_refused(NAME, TAGS.get(name, "differs"), *near(NEAR_DELTA_RULES[name]))


@sampled(
    3, ("name", "op"),
    [("state_clamped", "clamp"), ("state_squashed", "tanh"), ("state_gated_by_itself", "linalg_vector_norm"),
     ("state_of_unit_rows", "linalg_vector_norm"), ("state_within_a_norm", "linalg_vector_norm"),
     ("state_of_unit_mean", "mean")],
)  # fmt: skip
def test_names_what_changes_a_state(name, op):
    """The first of several changes that is no product: the norm in front of a gate."""
    (miss,) = check_graph(*near(NEAR_DELTA_RULES[name])).misses
    assert (miss.pass_name, miss.tag) == (NAME, "op") and f"goes through {op} " in miss.reason


@sampled(5, "size", [16, 64])
@pytest.mark.parametrize("norm", [no_norm, times_rsqrt])
def test_refuses_a_series_that_is_cut_off_late(size, norm):
    """High powers of a triangle are small where keys are not alike, and the rest would do for a smaller one."""
    form = in_chunks_of(size, partial(padded_into_zeros, inverse=one_doubling_less))
    assert_refused(NAME, "differs", *block(Spelling(form, norm=norm), 2 * size, heads=2, groups=1))


@sampled(5, "name", NEAR_LINEAR | SILENT)
def test_no_business_of_this_pass(name):
    """Nothing corrects a state, or what does is squashed or normed before it is read again."""
    outcome = check_graph(*near((NEAR_LINEAR | SILENT)[name]))
    assert not outcome.counts[NAME] and NAME not in {miss.pass_name for miss in outcome.misses}


@sampled(3, ("gates", "tags"), [(torch.sin, {"gates"}), (lambda g: g.sin().clamp(max=0), set())])
def test_a_clamp_of_sums_of_gates_wants_to_know_their_sign(gates, tags):
    """With gates over 0 it is no delta rule's."""

    def form(q, k, v, g, *others):
        return CHUNKED["channel_gates_by_columns"].form(q, k, v, gates(g), *others)

    outcome = check_graph(*block(Spelling(form, gate="channel", whole=True)))
    assert outcome.counts[NAME] == (not tags) and outcome.tags(NAME) == tags


@sampled(3, "bound", [{"max": -0.05}, {"min": -3.0}, {"min": -3.0, "max": 0}], ids=str)
def test_refuses_other_clamps(bound):
    """A trial with small gates does not see them."""

    def form(q, k, v, g, beta, state, size, scale, norm):
        q, k = (repeated(norm(x), v.shape[2]) for x in (q * scale, k))
        q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta[..., None]))
        total = g.transpose(1, 2).cumsum(-1)
        decay = (total[..., None] - total[..., None, :]).clamp(**bound).exp().tril()
        new = by_solving((beta * k @ k.mT * decay).tril(-1)) @ (beta * v)
        return ((q @ k.mT * decay) @ new).transpose(1, 2), state

    assert not check_graph(*block(Spelling(form))).counts[NAME]


def test_refuses_an_inverse_that_is_read_elsewhere():
    def form(*args):
        seen = []
        o, _ = chunk_after_chunk(*args, inverse=lambda lower: seen.append(by_solving(lower)) or seen[-1])
        return o, seen[0]

    assert_refused(NAME, "escapes", *near(form))


def test_refuses_an_inverse_under_no_grad():
    def inverse(lower):
        with torch.no_grad():
            return by_rows_in_place(lower)

    assert_refused(NAME, "region", *near(partial(padded_into_zeros, inverse=inverse)))


def test_tensors_that_would_be_large_are_tried_as_small_as_can_be(monkeypatch):
    """Two of everything that no loop has unrolled."""
    tried = []
    monkeypatch.setattr(proof, "MOST_ELEMENTS", 512)
    monkeypatch.setattr(proof, "recurrence", lambda given, eps: tried.append(given["v"].shape) or recurrence(given, eps))
    Verdicts.forget()
    assert check_graph(*block()).counts[NAME] == 1
    assert tried == [(2, 8, 4, 2)] * 2
    monkeypatch.setattr(proof, "MOST_ELEMENTS", 256)
    assert_refused(NAME, "differs", *block(Spelling(NEAR_DELTA_RULES["first_order"], whole=True)))


def test_refuses_what_is_too_large_to_try(monkeypatch):
    """The chunks of a loop keep their number and size in the trial."""
    monkeypatch.setattr(proof, "MOST_ELEMENTS", 100)
    Verdicts.forget()  # what another test had proved needs no trial
    assert_refused(NAME, "axes", *block(CHUNKED["solved_to_an_inverse"]))


@sampled(5, "name", LINEAR)
def test_linear_attention_is_none(name):
    assert not check_graph(*block(LINEAR[name], given=True, state=True)).counts[NAME]
