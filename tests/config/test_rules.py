"""Rules by name where one artifact serves several blocks, and rules that hit nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile import CheckpointingPolicy, PrecisionPlan, record
from megacpp_compile.config.checkpointing import KINDS
from megacpp_compile.config.options import Config
from megacpp_compile.errors import BlockKindError, MegacppError, RuleWithoutHitError
from megacpp_compile.passes import linear
from megacpp_compile.regional.repeated_blocks import find_kinds
from megacpp_compile.regional.split import config_for, split_by_rules
from tests.config.test_wrapped_names import DIM, model, x
from tests.remat import models as blocks


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rules", "frames"), [
    ({"*": "fp8_current"}, [("layers.0", 5, {"fp8_current"})]),
    ({"*": "fp8_current", "layers.4.*": "bf16"}, [("layers.0", 5, {"fp8_current"})]),  # the first one wins
    ({"layers.0.*": "bf16", "*": "fp8_current"}, [("layers.0", 1, {"bf16"}), ("layers.1", 4, {"fp8_current"})]),
    ({"layers.4.*": "bf16", "*": "fp8_current"}, [("layers.0", 4, {"fp8_current"}), ("layers.4", 1, {"bf16"})]),
    ({"layers.[04].mlp.up": "bf16", "*": "fp8_current"},
     [("layers.0", 2, {"bf16", "fp8_current"}), ("layers.1", 3, {"fp8_current"})]),
], ids=lambda value: " ".join(value) if isinstance(value, dict) else "")
def test_a_rule_for_one_layer_is_for_that_layer(eager_backend, monkeypatch, rules, frames):
    """Regression: the artifact compiled for the first block, by the first block's rules, served all."""
    monkeypatch.setattr(linear, "no_float8", lambda device: "")
    with record() as report:
        megacpp_compile.compile(model(5), precision=PrecisionPlan(rules, gate=False))(x().requires_grad_())
    assert [(f.block, f.blocks, {row["effective"] for row in f.precision}) for f in report.frames] == frames


class Hybrid(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.norm = nn.RMSNorm(blocks.DIM)
        self.mixer, self.mlp = (*parts, None)[:2]

    def forward(self, h):
        h = h + self.mixer(self.norm(h))
        return h if self.mlp is None else h + self.mlp(self.norm(h))


def hybrid():
    torch.manual_seed(0)
    made = (Hybrid(blocks.Mixer()) if i in (1, 3) else Hybrid(blocks.Attention(), blocks.SwiGLU()) for i in range(5))
    return blocks.Model(*made)


def kinds_of(**options):
    """(block, how many, entries by kind) of every frame of the hybrid."""
    with record() as report:
        megacpp_compile.compile(hybrid(), **options)(blocks.hidden().requires_grad_()).sum().backward()
    entries = [{kind: n["entries"] for kind, n in f.remat.items() if kind} for f in report.frames]
    return [(f.block, f.blocks, found) for f, found in zip(report.frames, entries, strict=True)]


@pytest.mark.end_to_end
def test_kinds_of_block_in_a_model_of_several(no_kernels):
    """Regression: every frame by itself had to be hit by every pattern."""
    options = {"policy": "selective", "block_kinds": {"layers.1.mixer": "rblock", "layers.4.mlp": "mblock"}}
    one, last = ["selective"], ["never"]
    assert kinds_of(**options) == [
        ("layers.0", 2, {"ablock": one, "eblock": one}), ("layers.1", 1, {"rblock": one}),
        ("layers.3", 1, {"mblock": one}), ("layers.4", 1, {"ablock": last, "mblock": last}),
    ]


@pytest.mark.end_to_end
def test_the_last_layer_by_itself(no_kernels):
    """An entry for it that is asked for holds where it is a graph of its own, and is estimated so."""
    options = {"policy": {"ablock": "selective", "last_layer": "full"}}
    assert kinds_of(**options)[-1] == ("layers.4", 1, {"ablock": ["full"], "eblock": ["full"]})
    for policy, kinds in (
        ({**dict.fromkeys(KINDS, "none")}, [3, 2]),  # there is nothing to take back
        ({"budget": 0.5, "last_layer": "full"}, [3, 2]),  # a budget knows no last layer
        ("selective", [2, 1, 2]),
    ):
        with record() as report:
            megacpp_compile.compile(hybrid(), policy=policy)
        assert [len(r.fqns) for r in report.regions if r.treatment == "compiled"] == kinds
    found = megacpp_compile.estimate(hybrid(), blocks.hidden().requires_grad_(), options=options)
    assert [a.module for a in found.activations[:-1]] == ["layers.{0,2}", "layers.4", "layers.{1,3}"]
    assert 2 * found.activations[1].compiled < found.activations[0].compiled


@pytest.mark.end_to_end
def test_the_last_layer_is_never_recomputed(no_kernels):
    """By default, in its own graph as in that of a whole model, and under operations that are named, too."""
    for policy, kept in (("full", "never"), ({**dict.fromkeys(KINDS, "none"), "recompute": "core_attn"}, "none")):
        with record() as report:
            model = megacpp_compile.compile(hybrid(), policy=policy)
            model(blocks.hidden().requires_grad_()).sum().backward()
        first, last = (next(f for f in report.frames if f.block == name) for name in ("layers.0", "layers.4"))
        assert {e for kind, n in last.remat.items() if kind for e in n["entries"]} == {kept}
        assert first.remat["ablock"]["again"] > last.remat["ablock"]["again"] == 0


def test_blocks_of_the_last_layer_belong_together():
    """Where blocks are parts of layers, those of the last one are kinds of their own."""
    model, config = hybrid(), Config(policy=CheckpointingPolicy.of("full"))
    kinds = split_by_rules(model, find_kinds(model, ["layers.*.mixer", "layers.*.mlp"]), config)
    assert {kind.fqns for kind in kinds if kind.last} == {("layers.4.mixer",), ("layers.4.mlp",)}
    assert config_for(kinds[0], config) == config


def test_blocks_that_an_exclusion_tells_apart():
    """One artifact for both would take the name of the first: an n-gram memory in fp8, or a plain block in bf16."""
    model = nn.ModuleDict({name: blocks.SwiGLU() for name in ("engram", "plain", "other")})
    config = Config(precision=PrecisionPlan.of("fp8_current"))
    assert [kind.fqns for kind in split_by_rules(model, find_kinds(model), config)] == [("engram",), ("plain", "other")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("options", "error"), [
    ({"precision": {"*.mlp.upp": "fp8_current"}}, RuleWithoutHitError),
    ({"block_kinds": {"layers.*.mpl": "mblock"}}, BlockKindError),
], ids=["precision", "block_kinds"])
def test_a_rule_without_a_hit_is_an_error(eager_backend, options, error, caplog):
    broken = model(5, broken=True)
    for make in (
        lambda: megacpp_compile.compile(model(5), options=options),  # before anything is changed
        lambda: megacpp_compile.explain(model(5), x(), options=options),
        lambda: megacpp_compile.estimate(model(5), x(), options=options),
        lambda: torch.compile(model(5), backend="megacpp", options=options)(x()),
        lambda: torch.compile(broken, backend="megacpp", options=options)(x()),  # of no piece
    ):
        with pytest.raises(MegacppError) as caught:
            make()
        assert isinstance(caught.value, error)
    # In pieces of a function it may be about another piece.
    torch.compile(lambda x: broken(x), backend="megacpp", options=options)(x())
    assert "between graph breaks" in caplog.text and next(iter(next(iter(options.values())))) in caplog.text


def test_a_rule_may_hit_what_multiplies_nothing(eager_backend):
    whole = nn.Sequential(nn.Embedding(11, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, 16))
    options = {"precision": {"0": "bf16", "1": "bf16", "2": "bf16"}}
    assert torch.compile(whole, backend="megacpp", options=options)(torch.zeros(4, dtype=torch.long)).shape == (4, 16)
