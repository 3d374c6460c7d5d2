"""Layouts of hybrid layers: kinds and ranks, pipeline stages, multi-token prediction."""

from __future__ import annotations

import pytest

from megacpp_compile.adapters.megatron import LayerLayout, layer_layout
from megacpp_compile.errors import LayoutError


def table(layout):
    return [(row.layer, row.kind, row.rank) for row in layout]


@pytest.mark.parametrize(("pattern", "want"), [
    ("A", [(0, "MLA", 0)]), ("MAED", [(0, "Mamba", None), (1, "MLA", 0), (2, "experts", None), (3, "DSA", 1)]),
    (["D", "R", "A", "A"], [(0, "DSA", 0), (1, "recurrent", None), (2, "MLA", 1), (3, "MLA", 2)]),
])
def test_patterns(pattern, want):
    assert table(layer_layout(pattern)) == want


def test_ranks_may_say_which_are_sparse():
    found = layer_layout("MAAMA", dsa_ranks=(1, 2))
    assert table(found) == [(0, "Mamba", None), (1, "MLA", 0), (2, "DSA", 1), (3, "Mamba", None), (4, "DSA", 2)]
    assert found.rows[2].why == "dsa_ranks has 1" and found.rows[1].why == "pattern"


@pytest.mark.parametrize("mtp", [2, "AA", ["A", "A"]])
def test_multi_token_prediction_is_mla(mtp):
    found = layer_layout("DDM", mtp_layers=mtp)
    assert table(found)[3:] == [(3, "MLA", 2), (4, "MLA", 3)]
    assert {row.why for row in found.rows[3:]} == {"multi-token prediction is MLA"}
    assert "multi-token prediction is MLA" in str(found)


@pytest.mark.parametrize(("pattern", "more", "words"), [
    ("AXA", {}, "layer 1: 'X' is none of A, D, M, E, R"), ("MEM", {}, "no attention layer"),
    ("", {}, "no attention layer"), ("AM", {"mtp_layers": "D"}, "never DSA"),
    ("AM", {"mtp_layers": "AM"}, "layer 3: multi-token prediction attends to all tokens"),
    ("AD", {"dsa_ranks": [0]}, "say it in one place"), ("AMA", {"dsa_ranks": [2]}, "ranks 0 to 1"),
    ("AMA", {"dsa_ranks": [-1]}, "ranks 0 to 1"),
])
def test_what_makes_no_model(pattern, more, words):
    with pytest.raises(LayoutError) as caught:
        layer_layout(pattern, **more)
    assert words in str(caught.value)


def test_a_stage_keeps_the_ranks_of_the_model():
    whole = layer_layout("AMDAMD", mtp_layers=1)
    cut = [whole.stage(0, 3), whole.stage(3, 4)]
    assert [row for stage in cut for row in stage] == list(whole) and [row.rank for row in cut[1]] == [2, None, 3, 4]
    whole.check_stage(cut[1], 3)
    with pytest.raises(LayoutError, match="layer 3: the stage has MLA of rank 0 in its place, the model MLA of rank 2"):
        whole.check_stage(layer_layout("AMD"), 3)
    with pytest.raises(LayoutError, match="the model DSA"):
        whole.check_stage(LayerLayout(cut[1].rows[:1]), 2)
    for first, count in ((5, 3), (-1, 2), (0, 0)):
        with pytest.raises(LayoutError, match="there are 7"):
            whole.stage(first, count)


def test_specs_by_letter():
    layout = layer_layout("MAD", mtp_layers=1)
    assert layout.specs({"M": 1, "A": 2, "D": 3, "E": 4}) == [1, 2, 3, 2]
    with pytest.raises(LayoutError, match=r"layer 2: nothing is given for D \(DSA\)"):
        layout.specs({"M": 1, "A": 2})
