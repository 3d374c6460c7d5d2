"""Gated delta rules of whole models: lengths that are symbols, and layers that are the same, which are proved once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megacpp_compile.matchers.delta_rule import rule
from megacpp_compile.matchers.delta_rule.verdicts import MOST, Structure, Verdict, Verdicts
from tests.corpus.delta.block import CHUNKED, PlainDelta, Spelling
from tests.corpus.delta.near_misses import NEAR_DELTA_RULES
from tests.frames import check, check_graph, run

from .conditions import assert_serves, sampled
from .deltas import OfItsInputs

NAME = "gated_delta_rule"
QUICK = CHUNKED["whole_sequence"]  # without a loop


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def stacked(*layers):
    return check_graph(Stack(*layers), PlainDelta().example_inputs(8))


@pytest.fixture
def proofs(monkeypatch):
    """The roots that were proved, or tried to be."""
    roots = []

    def proved(r, root, *rest):
        roots.append(root)
        return plain(r, root, *rest)

    plain = rule.proved
    monkeypatch.setattr(rule, "proved", proved)
    Verdicts.forget()
    yield roots
    Verdicts.forget()


@pytest.mark.end_to_end
@sampled(3, ("name", "length", "chunk"), [("doubling", 8, 4), ("rows_in_place", 6, 3)])
def test_dynamic(name, length, chunk):
    """Only the length is a symbol: a loop over chunks fixes how many there are, not how far the last is filled; here it
    is full."""
    module = PlainDelta(CHUNKED[name], chunk=chunk)
    frames = check(module, module.example_inputs(length), dynamic=True)
    assert frames.fired.get(NAME) == 1, frames.misses


@pytest.mark.end_to_end
def test_a_second_length():
    module = PlainDelta(CHUNKED["solved_to_an_inverse"])
    frames = run(module, module.example_inputs(6), fullgraph=False)
    assert_serves(frames, module, module.example_inputs(7), module.example_inputs(11), graphs=None)
    assert [analysis.frame.passes[NAME] for analysis in frames.analyses] == [1] * len(frames.analyses)
    assert len(frames.analyses) > 1


@pytest.mark.end_to_end
@sampled(4, "name", ["put_together", "gates_in_the_operands", "general_inverse", "rows_in_place"])
def test_inputs_of_a_second_length(name):
    """Each of the frame's inputs has a symbol of its own for the length that all of them have."""
    module = OfItsInputs(CHUNKED[name])
    frames = run(module, module.example_inputs(8), fullgraph=False)
    assert_serves(frames, module, module.example_inputs(12), module.example_inputs(12, batch=3), graphs=None)
    assert [analysis.frame.passes[NAME] for analysis in frames.analyses] == [1] * len(frames.analyses), frames.misses


@pytest.mark.end_to_end
def test_lengths_that_differ_are_compiled_again():
    """A batch that is as large as the length now need not be at the next call."""
    module = OfItsInputs(QUICK)
    frames = run(module, module.example_inputs(6), fullgraph=False)
    assert_serves(frames, module, module.example_inputs(5, batch=5), module.example_inputs(7, batch=3), graphs=2)


def test_layers_that_are_the_same_are_proved_once(proofs):
    for _ in range(2):  # a graph captured again is the same, too
        assert stacked(*(PlainDelta(QUICK) for _ in range(3))).counts[NAME] == 3
        assert len(proofs) == 1


@sampled(3, "other", [{"width": 4}, {"groups": 4}, {"strength": 2}], ids=str)
def test_layers_of_other_sizes_or_constants_are_proved_apart(proofs, other):
    assert stacked(PlainDelta(QUICK), PlainDelta(QUICK, **other)).counts[NAME] == 2
    assert len(proofs) == 2


def test_near_misses_beside_a_delta_rule(proofs):
    """They differ in a constant or an op, and are refused whatever was proved before, each for its own node."""
    near = Spelling(next(iter(NEAR_DELTA_RULES.values())))
    frames = stacked(PlainDelta(QUICK), PlainDelta(near), PlainDelta(near), PlainDelta(QUICK))
    assert frames.counts[NAME] == 2
    assert len([m for m in frames.misses if m.pass_name == NAME]) == 2


def test_few_verdicts_are_kept_and_no_nodes():
    Verdicts.forget()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    for i in range(MOST + 3):
        Verdicts().keep(Structure([x], [i]), Verdict({"q": 0}))
    assert Verdicts().get(Structure([x], [0])) is None
    assert Verdicts().get(Structure([x], [MOST + 2])) == Verdict({"q": 0})
    assert len(Verdicts._kept) == MOST
    assert all(isinstance(key, bytes) for key in Verdicts._kept)
    Verdicts.forget()


@pytest.mark.parametrize("a, b", [(1, 1.0), (1, True), ("1", 1), ((1,), (1, 1)), (torch.float32, torch.bfloat16)])
def test_constants_of_other_kinds_differ(a, b):
    assert Structure([], [a]).digest != Structure([], [b]).digest
    assert Structure([], [a]).digest == Structure([], [a]).digest


def test_what_is_not_known_to_be_equal_is_never_kept():
    structure = Structure([], [object()])
    Verdicts().keep(structure, Verdict())
    assert structure.digest is None
    assert Verdicts().get(structure) is None


class RatesOfHeads(PlainDelta):
    """Gates that no token changes, repeated for all tokens as the op's are."""

    def gates(self, u):
        return (-self.A_log.exp()).expand(*u.shape[:2], -1)


@pytest.mark.end_to_end
def test_gates_repeated_for_symbolic_numbers_of_tokens():
    module = RatesOfHeads()
    assert check(module, module.example_inputs(12), dynamic=True).fired == {NAME: 1}
