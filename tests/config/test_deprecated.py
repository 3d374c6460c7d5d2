"""What earlier releases called otherwise: it works, warns with the name of now, and is refused beside that name."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile import Config, PrecisionPlan, ShardingPlan
from megacpp_compile.config._deprecated import RENAMED_OPTIONS
from megacpp_compile.config.globs import block_hit, longest_hit
from megacpp_compile.errors import BadOptionError, PlanMismatchError, ShardingError, UnknownOptionError
from megacpp_compile.passes._driver import pass_names
from megacpp_compile.precision.sentinel import check
from megacpp_compile.precision.survey import manifest
from tests.precision import models

NAMES = sorted(RENAMED_OPTIONS.items())


@pytest.mark.parametrize(("old", "new"), NAMES)
@pytest.mark.parametrize("read", [
    lambda given: Config(**given), lambda given: Config.from_options(given, pass_names(), {}),
], ids=["constructor", "from_options"])
def test_the_old_name_of_an_option(read, old, new):
    value = not getattr(Config(), new)
    with pytest.warns(FutureWarning, match=f"'{old}' is now called '{new}'") as caught:
        config = read({old: value})
    assert [w.filename for w in caught] == [__file__], "once, and about the caller"
    assert config == Config(**{new: value}) and getattr(config, new) is value and old not in config.to_dict()
    with pytest.raises(BadOptionError, match=f"option {old}: got {value}.*{new!r} is given too"):
        read({old: value, new: value})
    with pytest.warns(FutureWarning), pytest.raises(BadOptionError, match=f"option {new}: got 'yes'"):
        read({old: "yes"})


@pytest.mark.parametrize(("old", "new"), NAMES)
def test_the_old_name_reaches_every_door(old, new, monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **_: gm.forward)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    with pytest.warns(FutureWarning, match=new):
        torch.compile(model, backend="megacpp", options={old: True})(x)
    with pytest.warns(FutureWarning, match=new):
        megacpp_compile.explain(model, x, options={old: True})
    with pytest.warns(FutureWarning, match=new):
        megacpp_compile.compile(model, **{old: True})(x)
    with pytest.raises(BadOptionError, match=new):
        megacpp_compile.compile(nn.Linear(4, 4), options={old: True}, **{new: True})


@pytest.mark.parametrize(("typed", "meant"), [
    ("fuse_shared_input_gem", "fuse_shared_input_gemms"), ("autotune_gems", "autotune_gemms"),
    ("merge_donw", "fuse_shared_input_gemms"), ("tune_product", "autotune_gemms"),
])
def test_a_misspelling_of_either_name_is_told_the_name_of_now(typed, meant):
    with pytest.raises(UnknownOptionError, match=f"Did you mean {meant!r}") as caught:
        Config.from_options({typed: True}, pass_names(), {})
    valid = str(caught.value).partition("Valid options")[2]
    assert meant in valid and not [old for old in RENAMED_OPTIONS if old in valid]


def test_the_names_of_now_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Config(fuse_shared_input_gemms=True, autotune_gemms=False)
        assert dataclasses.replace(config, strict=True).fuse_shared_input_gemms
        assert Config.from_options(config.to_dict(), pass_names(), {}) == config
        assert PrecisionPlan.from_manifest(PrecisionPlan().manifest()) == PrecisionPlan()
        assert block_hit("*.mixer", "layers.0.mixer") and not block_hit("layers.*.mixer", "layers.0.mlp")


def test_methods_of_plans_that_walked_a_model_or_pinned():
    plan, model = PrecisionPlan(gate=False), models.model()
    with pytest.warns(FutureWarning, match=r"call megacpp_compile.precision.survey.assert_plan\(plan, ") as caught:
        plan.assert_plan(model)
    assert [w.filename for w in caught] == [__file__]
    with pytest.warns(FutureWarning), pytest.raises(PlanMismatchError):
        plan.assert_plan(model, target="cuda")
    with pytest.warns(FutureWarning, match=r"call megacpp_compile.precision.survey.manifest\(plan, "):
        text = plan.manifest(model, target="cuda")
    assert text == manifest(plan, model, target="cuda") and len(json.loads(text)["linears"]) == 21
    plan, model = ShardingPlan({"model": 1}, {"*.weight": None}), nn.ModuleDict({"q": nn.Linear(4, 8)})
    with pytest.warns(FutureWarning, match=r"megacpp_compile.sharding.apply\(plan, "), pytest.raises(ShardingError):
        plan.apply(model)
    with pytest.warns(FutureWarning, match=r"megacpp_compile.sharding.pin\(plan, "), pytest.raises(ShardingError, match="x as"):
        plan.pin(torch.zeros(2, 2), None, "x")
    with pytest.warns(FutureWarning, match=r"megacpp_compile.sharding.constructing\(plan, "):
        inside = plan.constructing("fc")
    with pytest.raises(ShardingError, match="fc.weight"), inside:
        megacpp_compile.NativeLayerSpec()["linear_fc2"](8, 8, bias=False)


@pytest.mark.parametrize("pattern", ["*mixer", "layers.*mixer", "layers.0.mix*", "*mix*"])
def test_a_star_of_block_kinds_that_crosses_a_dot(pattern):
    crosses = pattern != "layers.0.mix*"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert longest_hit([pattern], "layers.0.mixer.in_proj") == ("layers.0.mixer", pattern)
    assert [w.category for w in caught] == [FutureWarning] * crosses
    if crosses:
        assert f"block_kinds: {pattern!r} hits 'layers.0.mixer'" in str(caught[0].message)


def test_a_star_of_allow_modules_that_crosses_a_dot():
    graph = torch.fx.symbolic_trace(nn.Sequential(Widens())).graph
    for node in graph.nodes:
        dtype = torch.float8_e4m3fn if node.op == "placeholder" else torch.bfloat16
        node.meta = {"val": torch.zeros(4, dtype=dtype), "nn_module_stack": {"a": ("blocks.0.mlp", Widens)}}
    assert len(check(graph)) == len(check(graph, allow_modules=("*.attn",))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(graph, allow_modules=("blocks.*",)) == check(graph, allow_modules=("*.mlp",)) == []
    with pytest.warns(FutureWarning, match="allow_modules: 'blocks*' hits 'blocks.0.mlp'".replace("*", "[*]")):
        assert check(graph, allow_modules=("blocks*",)) == []


class Widens(nn.Module):
    def forward(self, x):
        return x.bfloat16()
