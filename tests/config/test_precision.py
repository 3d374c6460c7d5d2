"""`PrecisionPlan`: rules, roles, the gate, manifests, and the option of that name."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle

import pytest
import torch
from torch import nn

from megacpp_compile import PrecisionPlan
from megacpp_compile.config import fp8_gain, rules
from megacpp_compile.config.options import Config
from megacpp_compile.config.roles import role_of
from megacpp_compile.errors import BadOptionError, ManifestError, PlanMismatchError, RuleWithoutHitError
from megacpp_compile.precision.survey import assert_plan, manifest
from tests.precision import models

WIDE = (None, 8192, 8192)


@pytest.mark.parametrize(("name", "role"), [
    ("model.layers.0.self_attn.q_a_proj", "attention"), ("model.layers.0.self_attn.out_proj", "attention"),
    ("model.layers.0.mlp.gate", "router"), ("model.layers.0.mlp.experts.3.gate", "experts"),
    ("experts.3.gate", "experts"), ("model.layers.3.gate", "router"), ("model.layers.0.mlp.gate_proj", "experts"),
    ("model.layers.0.mlp.experts.7.w1", "experts"), ("model.layers.0.block_sparse_moe.router.layer", "router"),
    ("backbone.layers.1.mixer.in_proj", "mamba"), ("backbone.layers.1.mixer.q_proj", "attention"),
    ("model.layers.0.mamba.out_proj", "mamba"), ("lm_head", "head"), ("score_head", "head"),
    ("transformer.wte", "embedding"), ("model.embed_tokens", "embedding"), ("model.norm", "norm"),
    ("adapter.linear", "other"),
    ("model.layers.0.self_attn", "attention"),  # weights of the module's own
    ("model.layers.0.experts", "experts"), ("model.layers.0.moe_gate", "other"),
])
def test_roles(name, role):
    assert role_of(name) == role


def test_classes_and_siblings_tell_what_names_do_not():
    assert role_of("blocks.0.inner.proj", ["MultiHeadAttention", "Block"]) == "attention"
    assert role_of("blocks.0.inner.proj", ["Block"]) == "other"
    for beside in (("experts", "up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")):
        assert role_of("layers.0.moe.gate", ["MoE"], ("gate", *beside)) == "router"
    for gate in ("gate", "wg"):
        assert role_of(f"layers.0.mlp.{gate}", ["MoE"], (gate, "experts", "shared_experts")) == "router"
    assert role_of("layers.0.attn.gate", ["GatedAttention"], ("gate", "q_proj", "k_proj", "o_proj")) == "router"
    flat = ("q_proj", "o_proj", "w1", "w2", "extra")
    assert role_of("layers.0.extra", ["Block"], flat) == "other"
    assert role_of("layers.0.mixer.in_proj", ["Mixer"], ("in_proj", "x_proj", "dt_proj", "out_proj")) == "mamba"
    assert role_of("layers.0.attn.c_proj", ["Attention"], ("c_attn", "c_proj")) == "attention"


GLU = [
    ("gate", "up", "down"), ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("w_gate", "w_up", "w_down"),
    ("fc1", "fc2"), ("wi_0", "wi_1", "wo"), ("linear1", "linear2"), ("gate", "up", "out"), ("wg", "wu", "wd"),
    ("proj_gate", "proj_up", "proj_down"), ("gate_up", "down"), ("c_fc", "c_proj"), ("in_up", "in_gate", "out"),
]  # fmt: skip


@pytest.mark.parametrize("names", GLU, ids=" ".join)
def test_a_feed_forward_has_one_role_whatever_its_parent_is_called(names):
    for parent in ("layers.0.mlp", "layers.0.feed_forward", "layers.0.second", "layers.0.body.inner", "layers.0"):
        for classes in (["MLP"], ["SwiGLU"], ["Block"], []):
            roles = {role_of(f"{parent}.{name}", classes, names) for name in names}
            assert roles == {"experts"}, (parent, classes)


def test_first_match_wins_so_the_order_of_rules_is_part_of_the_plan():
    plan = PrecisionPlan({"*.mlp.up_proj": "fp8_block", "*.mlp.*": "bf16", "*": "fp8_current"})
    found = [plan.decide(name) for name in ("a.mlp.up_proj", "a.mlp.down_proj", "a.q")]
    assert [(d.requested, d.rule) for d in found] == [
        ("fp8_block", "*.mlp.up_proj"), ("bf16", "*.mlp.*"), ("fp8_current", "*"),
    ]  # fmt: skip
    one, other = {"a.*": "bf16", "*.q": "fp8_block"}, {"*.q": "fp8_block", "a.*": "bf16"}
    assert PrecisionPlan(one) != PrecisionPlan(other)
    assert Config(precision=one).cache_key() != Config(precision=other).cache_key()


def test_frozen_and_hashable():
    plan = PrecisionPlan({"*.q": "fp8_block"}, {"mamba": "fp8_current"})
    assert plan == PrecisionPlan((("*.q", "fp8_block"),), {"mamba": "fp8_current"}) != PrecisionPlan()
    assert len({plan, PrecisionPlan({"*.q": "fp8_block"}, {"mamba": "fp8_current"}), PrecisionPlan()}) == 2
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.gate = False


def test_defaults_by_role_and_what_stands_for_a_plan():
    roles = dict(PrecisionPlan().roles)
    assert {role for role, recipe in roles.items() if recipe == "fp8_current"} == {"attention", "experts"}
    assert {recipe for role, recipe in roles.items() if role not in ("attention", "experts")} == {"bf16"}
    assert {"router", "norm", "head", "embedding", "mamba", "other"} < set(roles)
    assert dict(PrecisionPlan(roles={"experts": "bf16"}).roles)["attention"] == "fp8_current"
    assert PrecisionPlan.of(None) is None and PrecisionPlan.of("fp8_current") == PrecisionPlan()
    assert PrecisionPlan.of("bf16").recipes() == {"bf16"}
    assert PrecisionPlan.of("fp8_block").recipe_for("a.self_attn.q_proj") == "fp8_block"
    assert PrecisionPlan.of({"*.q": "bf16"}) == PrecisionPlan({"*.q": "bf16"})
    plan = PrecisionPlan({"*.q": "bf16"}, {"head": "fp8_block"}, gate=False)
    assert PrecisionPlan.of(plan) is plan and PrecisionPlan.of(plan.to_dict()) == plan
    assert PrecisionPlan.of(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(("value", "words"), [
    ("fp8", ["Did you mean 'fp8_current'?", "'fp8_block'"]), ("fp8_curent", ["Did you mean 'fp8_current'?"]),
    ({"*.q": "blockwise"}, ["precision.rules['*.q']", "Did you mean 'fp8_block'?"]),
    ({"ruels": []}, ["Did you mean 'rules'?"]),
    ({"rules": [], "roles": {"atention": "bf16"}}, ["Did you mean 'attention'?"]),
    ({"rules": [["*.q", "bf16"], ["*.q", "bf16"]]}, ["every pattern once"]),
    ({"a..b": "bf16"}, ["a glob over module names"]), ({"rules": 3}, ["pairs"]),
    ({"rules": [], "gate": 1}, ["precision.gate"]), (0.5, ["a PrecisionPlan"]),
    ("nvfp4", ["can be traced", "plan.traceable()"]), ({"*.q": "nvfp4"}, ["can be traced"]),
], ids=str)
def test_bad_options(value, words):
    with pytest.raises(BadOptionError) as caught:
        Config.from_options({"precision": value}, ())
    assert [w for w in words if w not in str(caught.value)] == []


def test_option_and_four_bits_for_modules():
    assert Config().precision is None
    config = Config.from_options({"precision": {"*.mlp.up_proj": "fp8_block"}}, ())
    assert config.precision.recipe_for("layers.0.mlp.up_proj", "experts", WIDE) == "fp8_block"
    assert config == pickle.loads(pickle.dumps(config)) == Config(**config.to_dict())
    assert len({c.cache_key() for c in (config, Config(), Config(precision="fp8_current"))}) == 3
    assert Config(precision=PrecisionPlan.of("nvfp4").traceable()).precision.recipes() == {"bf16"}
    plan = PrecisionPlan({"*.q_proj": "nvfp4", "*": "fp8_delayed"})
    assert plan.recipe_for("a.self_attn.q_proj", "attention", WIDE) == "nvfp4"
    assert plan.traceable().recipe_for("a.self_attn.q_proj", "attention", WIDE) == "bf16"
    assert plan.traceable().recipe_for("a.self_attn.o_proj", "attention", WIDE) == "fp8_delayed"


def test_joining_that_moves_less_and_the_gate_of_experts():
    """Gradients of few channels beside a wide input: queries, keys and values of few heads, not gate and up."""
    assert fp8_gain.joining_moves_less([(None, 4096, 4096), (None, 1024, 4096), (None, 1024, 4096)])
    assert fp8_gain.joining_moves_less([(4096, 1536, 7168), (4096, 576, 7168)])
    assert not fp8_gain.joining_moves_less([(None, 11008, 4096), (None, 11008, 4096)])
    assert not fp8_gain.joining_moves_less([(None, 16, 4096)])
    # 64 experts of 1408 x 2048: 98304 rows pay for the casts of the weights, half as many do not.
    assert fp8_gain.experts_refusal(16384, 98304, 64, 2048, 1408) == ""
    assert "over 49152 rows: predicted gain 1.0" in fp8_gain.experts_refusal(8192, 49152, 64, 2048, 1408)
    assert "not fixed" in fp8_gain.experts_refusal(None, None, 64, 2048, 1408)
    assert "multiples of 128" in fp8_gain.experts_refusal(16384, 98304, 64, 2048, 1400)
    gains = [fp8_gain.experts_gain(t, 6 * t, 64, 2048, 1408) for t in (64, 1024, 16384, 2**24)]
    assert gains == sorted(gains) and gains[-1] < fp8_gain.EXPERTS.fp8_tflops / fp8_gain.EXPERTS.bf16_tflops


@pytest.mark.parametrize(("shape", "recipe"), [
    (WIDE, "fp8_current"), ((16384, 4096, 4096), "fp8_current"),
    ((None, 128, 8192), "bf16"),  # a short side on either end
    ((None, 8192, 128), "bf16"),
    ((64, 8192, 8192), "bf16"),  # too few tokens to pay for the weight's cast
])
def test_gate(shape, recipe):
    found = PrecisionPlan().decide("a.self_attn.q_proj", "attention", shape)
    assert (found.requested, found.effective) == ("fp8_current", recipe) and bool(found.reason) == (recipe == "bf16")
    assert ("predicted gain" in found.reason) == (recipe == "bf16")
    assert PrecisionPlan(gate=False).recipe_for("a.self_attn.q_proj", "attention", shape) == "fp8_current"


def test_gate_follows_its_rates(monkeypatch):
    """The gain is between nothing and the ratio of the rates, and grows with every side."""
    for recipe, rates in fp8_gain.RATES.items():
        gains = [fp8_gain.gain(recipe, (m, n, n)) for m, n in ((64, 256), (1024, 256), (1024, 4096), (None, 4096))]
        assert gains == sorted(gains) and 0 < gains[0] and gains[-1] < rates.tflops / fp8_gain.BF16_TFLOPS
    assert fp8_gain.gain("fp8_delayed", (None, 512, 4096)) > fp8_gain.gain("fp8_current", (None, 512, 4096))
    assert fp8_gain.gain("fp8_current", (1 << 40, 512, 512)) == pytest.approx(fp8_gain.gain("fp8_current", (None, 512, 512)))
    assert fp8_gain.refusal("bf16", (1, 16, 16)) == ""


def test_logged_in_full_once(caplog):
    rules.announce.cache_clear()
    plan = PrecisionPlan({"*.mlp.gate": "bf16"})
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        for _ in range(2):
            rules.announce(plan, "cuda")
    (record,) = caplog.records
    text = record.getMessage()
    assert "*.mlp.gate -> bf16" in text and "role attention -> fp8_current" in text and "role head -> bf16" in text


@pytest.mark.parametrize("target", ["cpu", "tpu"])
def test_bf16_everywhere_elsewhere(target, caplog):
    rules.announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        rules.announce(PrecisionPlan(), target)
    line = f"precision plan: bf16 everywhere (target {target}: no float8 here)"
    assert [r.getMessage() for r in caplog.records] == [line]
    assert PrecisionPlan.of("bf16").describe("cuda") == "precision plan: bf16 everywhere"


def test_compiling_logs_the_plan(caplog, monkeypatch):
    rules.announce.cache_clear()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **_: gm.forward)
    with caplog.at_level(logging.INFO, logger="megacpp_compile"):
        x = torch.randn(2, 16)
        got = torch.compile(nn.Linear(16, 16), backend="megacpp", options={"precision": "fp8_current"})(x)
    assert got.shape == (2, 16)
    assert "precision plan: bf16 everywhere (target cpu: no float8 here)" in [r.getMessage() for r in caplog.records]


def test_manifest_round_trip():
    plan = PrecisionPlan({"*.mlp.*": "fp8_block"}, gate=False)
    text = manifest(plan, models.model(), target="cuda")
    assert PrecisionPlan.from_manifest(text) == plan
    rows = {row["fqn"]: row for row in json.loads(text)["linears"]}
    assert len(rows) == 2 * 10 + 1
    up, head = rows["layers.0.mlp.up_proj"], rows["lm_head"]
    assert (up["requested"], up["effective"], up["rule"], up["holds"]) == ("fp8_block", "fp8_block", "*.mlp.*", "bf16")
    assert up["shape"] == [48, 32] and (head["effective"], head["reason"]) == ("bf16", "excluded by 'lm_head'")
    assert json.loads(PrecisionPlan().manifest())["linears"] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "plan": {}}', '{"format": 1, "plan": {"rules": [["a", "b"]]}}'])
def test_what_is_no_manifest(text):
    with pytest.raises(ManifestError):
        PrecisionPlan.from_manifest(text)


def test_assert_plan_lists_the_differences_and_wants_every_rule_to_hit():
    plan, model = PrecisionPlan(gate=False), models.model()
    assert_plan(PrecisionPlan.of("bf16"), model)
    assert_plan(plan, model)  # on CPU: bf16 everywhere
    with pytest.raises(PlanMismatchError) as caught:
        assert_plan(plan, model, target="cuda")
    lines = caught.value.differences
    assert len(lines) == 2 * 8  # five of attention, three of the MLP
    assert "layers.0.self_attn.o_proj: the plan says fp8_current by role attention, Linear holds bf16" in lines
    assert lines[0] in str(caught.value)
    with pytest.raises(RuleWithoutHitError, match="mlp.gat'"):
        assert_plan(PrecisionPlan({"*.mlp.gat": "bf16"}), models.model())
    assert_plan(PrecisionPlan({"*.mlp.gate": "bf16", "wte": "bf16"}), models.model())
