"""The dialect of globs over names, and what its users make of several hits."""

from __future__ import annotations

import pytest
from torch import nn

from megacpp_compile.config.globs import block_hit, hits, longest_hit, outermost_hits
from megacpp_compile.regional.repeated_blocks import find_kinds


@pytest.mark.parametrize(("pattern", "name", "hit"), [
    ("*.mlp.gate", "model.layers.0.mlp.gate", True), ("*.mlp.gate", "mlp.gate", True),
    ("*.mlp.gate", "model.layers.0.mlp.gate_proj", False), ("*.mlp.gate", "model.layers.0.mlp.gate.linear", False),
    ("*.mlp.gate*", "model.layers.0.mlp.gate_proj", True), ("*.mlp.*", "a.mlp.experts.3.up_proj", True),
    ("*.mlp.*", "a.mlp", False), ("layers.?.q", "layers.3.q", True), ("layers.?.q", "layers.33.q", False),
    ("layers.[0-3].q", "layers.2.q", True), ("l*.q", "layers.2.q", False), ("*", "a.b.c", True),
    ("a.*.c", "a.c", False), ("q_proj", "layers.0.q_proj", False),
])
def test_globs_are_over_whole_segments(pattern, name, hit):
    assert hits(pattern, name) is hit


NAMES = ["layers", "layers.0", "layers.0.mlp", "layers.0.mlp.up", "layers.1", "layers.1.mlp", "norm"]


@pytest.mark.parametrize(("pattern", "found"), [
    ("layers.*", ["layers.0", "layers.1"]), ("layers.1", ["layers.1"]), ("*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
    ("*", ["layers", "norm"]), ("layers.*.up", ["layers.0.mlp.up"]), ("layer.*", []),
])
def test_the_outermost_hits(pattern, found):
    assert outermost_hits(pattern, NAMES) == found


def test_blocks_are_the_outermost_hits_and_one_layer_the_end_of_a_pattern():
    def layer():
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    model = nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList([layer(), layer()])})})
    every = ("decoder.layers.0", "decoder.layers.1")
    for patterns in (["decoder.layers.*"], ["*.layers.*"], ["*.layers.[01]"], ["decoder.layers.*", "decoder.layers.0.1"]):
        assert [kind.fqns for kind in find_kinds(model, patterns)] == [every]
    assert [kind.fqns for kind in find_kinds(model, ["*.1"])] == [("decoder.layers.0.1",), ("decoder.layers.1",)]
    assert block_hit("layers.*.mixer", "mixer") and block_hit("layers.*.mixer", "layers.0.mixer")
    assert not block_hit("layers.0.mixer", "layers.1.mixer") and not block_hit("layers.*.mixer", "mlp")


@pytest.mark.parametrize(("fqn", "found"), [
    ("layers.3.mixer.in_proj", ("layers.3.mixer", "layers.*.mixer")),
    ("layers.3.mixer", ("layers.3.mixer", "layers.*.mixer")),
    ("layers.30.mixer", ("layers.30.mixer", "layers.30.mixer")), ("layers.3.mlp", None),
    ("mixer.in_proj", ("mixer", "layers.30.mixer")),  # in a frame that is one layer
])
def test_the_longest_pattern_wins(fqn, found):
    assert longest_hit(["layers.*.mixer", "layers.30.mixer"], fqn) == found
