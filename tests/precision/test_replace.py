"""`replace_linears`: what is replaced, what is left and why, and that the model stays the same model."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

from megacpp_compile import PrecisionPlan, replace_linears
from megacpp_compile.errors import EngineError, NotAModuleError, PlanMismatchError, RuleWithoutHitError
from megacpp_compile.precision import engine
from megacpp_compile.precision.native_attention import DotProductAttention as Native
from megacpp_compile.precision.replace import DEFAULT_EXCLUSIONS
from megacpp_compile.precision.survey import assert_plan

from . import models

EVERYTHING = PrecisionPlan({"*": "fp8_current"}, gate=False)
ATTENTION = ("q_a_proj", "q_b_proj", "k_proj", "v_proj", "o_proj")


def convert(te, model, plan=EVERYTHING, *args, **kwargs):
    return replace_linears(model, plan, *args, target=te.target, **kwargs)


def step(model, *inputs):
    """(output, gradient of every parameter by name), in float32."""
    model.zero_grad()
    out = model(*inputs)
    out.float().square().mean().backward()
    return out.detach().float(), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, tolerance):
    (out, grads), (wanted, wanted_grads) = got, want
    assert grads.keys() == wanted_grads.keys()
    for a, b in [(out, wanted), *((grads[n], wanted_grads[n]) for n in grads)]:
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6


# --- which


class Cores(nn.Module):
    """Two attention modules that hold a core, and a linear each."""

    def __init__(self, core):
        super().__init__()
        for name in ("first", "second"):
            self.add_module(name, nn.ModuleDict({"o_proj": nn.Linear(32, 32), "core_attention": core(2, 16)}))


def test_an_attention_s_core_is_refused_by_name(stand_in, monkeypatch, caplog):
    """By its role or by a rule; none is said to be asked for by default, nor where nothing is replaced for another."""
    model = Cores(stand_in.DotProductAttention)
    asked = PrecisionPlan(roles={"attention_core": "fp8_delayed"}, gate=False)
    rows = [row for row in replace_linears(model, asked, target="cuda") if row.role == "attention_core"]
    assert [row.fqn for row in rows] == ["first.core_attention", "second.core_attention"]
    assert {(row.requested, row.done, row.rule) for row in rows} == {("fp8_delayed", False, "role attention_core")}
    assert all("fp8_dpa" in row.reason for row in rows) and "second.core_attention: role attention_core asks" in caplog.text
    (row,) = (r for r in replace_linears(models.model(), asked, target="cuda") if r.role == "attention_core")
    assert row.fqn == "(attention cores)" and "no module is Transformer Engine's" in row.reason
    default = replace_linears(Cores(stand_in.DotProductAttention), "fp8_current", target="cuda")
    assert [row.role for row in default] == ["attention", "attention"]
    monkeypatch.setattr(engine, "load", lambda: (None, "ImportError: no such package"))
    table = replace_linears(Cores(Native), asked, target="cuda")
    assert table.skipped["first.core_attention"] == "ImportError: no such package"
    assert replace_linears(Cores(Native), asked, target="cpu").skipped["second.core_attention"] == "target cpu: no float8 here"


def test_every_linear_is_in_the_table_with_its_rule(te):
    model = models.model(te)
    table = convert(te, model)
    assert table.skipped["layers.0.mlp.gate"] == "4x32: fp8 takes multiples of 16"
    assert {"layers.0.mlp.gate_proj", "layers.0.self_attn.q_a_proj"} <= set(table.done)
    linears = [n for n, m in models.model().named_modules() if isinstance(m, nn.Linear)]
    assert [row.fqn for row in table] == linears
    assert all(row.done or row.reason for row in table)
    assert {row.rule for row in table} == {"*"}
    row = next(row for row in table if row.fqn == "layers.1.mlp.up_proj")
    assert (row.done, row.now, row.module, row.shape) == (True, "te.Linear, fp8_current", "Linear", (48, 32))
    text = str(table)
    assert all(name in text for name in linears) and "excluded by 'lm_head'" in text
    assert f"{len(table.done)} of {len(linears)} modules replaced" in text


def test_default_exclusions_are_parts_of_any_segment(te):
    names = (*DEFAULT_EXCLUSIONS, "moe_router", "lora_A", "Shared_LM_Head", "plain", "temporal_mix", "temporary")
    named = nn.ModuleDict({name: nn.Sequential(nn.Linear(32, 32)) for name in names})
    table = convert(te, named.to(te.device, te.dtype))
    assert table.done == ("plain.0", "temporary.0")
    assert table.skipped["moe_router.0"] == "excluded by 'router'"
    assert table.skipped["lora_A.0"] == "excluded by 'lora_'"


def test_default_exclusions_are_all_there():
    """What training found to lose precision; see docs/precision.md."""
    assert set(DEFAULT_EXCLUSIONS) == {
        "wte", "wpe", "lm_head", "router", "shared_expert_gate", "engram", "mhc", "ngram_hash", "structure_emb",
        "platform_emb", "temporal_", "lora_",
    }  # fmt: skip


def test_own_exclusions_are_globs_over_whole_segments(te):
    table = convert(te, models.model(te), exclude=(*DEFAULT_EXCLUSIONS, "*.mlp.gate", "layers.0.self_attn.*"))
    assert table.skipped["layers.1.mlp.gate"] == "excluded by '*.mlp.gate'"
    assert "layers.1.mlp.gate_proj" in table.done
    assert not [n for n in table.done if n.startswith("layers.0.self_attn")]
    assert {f"layers.1.self_attn.{n}" for n in ATTENTION} <= set(table.done)


def test_roles_decide_what_no_rule_names(te):
    table = convert(te, models.model(te, layers=1), PrecisionPlan(gate=False))
    layer = "layers.0"
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert set(table.done) == {*(f"{layer}.self_attn.{n}" for n in ATTENTION), *(f"{layer}.mlp.{n}" for n in mlp)}
    row = next(row for row in table if row.fqn == f"{layer}.mlp.gate")
    assert (row.role, row.requested, row.rule, row.done) == ("router", "bf16", "role router", False)
    table = convert(te, models.model(te), PrecisionPlan({"*": "fp8_current"}))  # whose gate leaves small linears
    assert table.done == () and "predicted gain" in table.skipped["layers.0.self_attn.q_b_proj"]


def test_tied_weights_are_left(te):
    model = models.model(te)
    model.layers[1].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight
    model.layers[1].self_attn.k_proj = model.layers[0].self_attn.k_proj
    model.layers[1].self_attn.v_proj.weight = nn.Parameter(model.layers[0].self_attn.v_proj.weight.detach())
    table = convert(te, model)
    for name in ("mlp.up_proj", "self_attn.k_proj", "self_attn.v_proj"):
        for layer in (0, 1):
            assert "tied" in table.skipped[f"layers.{layer}.{name}"]
    assert model.layers[1].mlp.up_proj.weight is model.layers[0].mlp.up_proj.weight


def test_linears_wrapped_by_lora_are_left(te):
    class Subclass(nn.Linear):
        pass

    peft = nn.ModuleDict({"base_layer": nn.Linear(32, 32), "lora_A": nn.ModuleDict({"default": nn.Linear(32, 16)}),
                          "lora_B": nn.ModuleDict()})  # fmt: skip
    by_hand = nn.ModuleDict({"linear": nn.Linear(32, 32)})
    by_hand.register_parameter("lora_down", nn.Parameter(torch.zeros(16, 32)))
    model = nn.ModuleDict({"q": peft, "k": by_hand, "v": Subclass(32, 32), "o": nn.Linear(32, 32)})
    table = convert(te, model.to(te.device, te.dtype))
    assert table.done == ("o",)
    assert table.skipped["q.base_layer"] == table.skipped["k.linear"] == "wrapped by LoRA"
    assert table.skipped["q.lora_A.default"] == "excluded by 'lora_'"
    assert "Subclass is not nn.Linear itself" in table.skipped["v"]


def test_what_else_is_left(te):
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("hooked", "computed", "wide", "plain")})
    model["hooked"].register_forward_hook(lambda *_: None)
    nn.utils.parametrizations.weight_norm(model["computed"])
    model = model.to(te.device, te.dtype)
    model["wide"].double()
    table = convert(te, model)
    assert table.done == ("plain",)
    assert "hooks" in table.skipped["hooked"] and "float64" in table.skipped["wide"]
    assert "ParametrizedLinear" in table.skipped["computed"]


def test_a_rule_or_exclusion_without_a_hit_is_an_error():
    model = models.model()
    before = dict(model.named_modules())
    with pytest.raises(RuleWithoutHitError, match="Did you mean 'layers.0.mlp.gate'"):
        replace_linears(model, {"layers.0.mlp.gat": "bf16"})
    with pytest.raises(RuleWithoutHitError, match="up_porj"):
        replace_linears(model, "fp8_current", (*DEFAULT_EXCLUSIONS, "*.up_porj"))
    assert dict(model.named_modules()) == before
    with pytest.raises(NotAModuleError):
        replace_linears(lambda x: x, "bf16")
    with pytest.raises(ValueError, match="plan"):
        replace_linears(models.model(), None)


# --- where


@pytest.mark.parametrize("target", ["auto", "cpu", "tpu"])
def test_no_op_on_cpu_and_tpu_in_one_log_line(stand_in, target, caplog):
    model = models.model()
    before = dict(model.named_modules())
    with caplog.at_level(logging.DEBUG, logger="megacpp_compile"):
        table = replace_linears(model, EVERYTHING, target=target)
    (record,) = caplog.records
    where = "cpu" if target == "auto" else target
    why = f"target {where}: no float8 here"
    assert record.getMessage().startswith(f"precision plan: bf16 everywhere ({why}); replace_linears left all")
    assert dict(model.named_modules()) == before
    assert table.done == () and len(table.rows) == 21
    assert table.reason == table.skipped["layers.0.mlp.up_proj"] == why


def test_no_op_without_transformer_engine(monkeypatch, caplog):
    monkeypatch.setattr(engine, "load", lambda: (None, "ImportError: undefined symbol"))
    model = models.model()
    with caplog.at_level(logging.DEBUG, logger="megacpp_compile"):
        table = replace_linears(model, EVERYTHING, target="cuda")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "undefined symbol" in record.getMessage()
    assert table.done == () and table.reason == "ImportError: undefined symbol"
    with pytest.raises(PlanMismatchError):
        assert_plan(EVERYTHING, model, target="cuda")


def test_no_op_on_a_device_without_fp8_or_with_an_old_transformer_engine(stand_in, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "is_fp8_available", lambda return_reason: (False, "sm_80"))
        assert replace_linears(models.model(), EVERYTHING, target="cuda").reason == "fp8_current: sm_80"
    monkeypatch.delattr(stand_in, "autocast")
    assert "no autocast" in replace_linears(models.model(), EVERYTHING, target="cuda").reason


def test_overlap_without_user_buffers_is_refused(stand_in, state, caplog):
    model = models.model()
    with pytest.raises(EngineError, match="user buffers are not initialised"):
        replace_linears(model, EVERYTHING, target="cuda", tp_comm_overlap=True)
    assert type(model.layers[0].mlp.up_proj) is nn.Linear
    state.user_buffers = True
    assert replace_linears(model, EVERYTHING, target="cuda", tp_comm_overlap=True).done
    assert "nothing overlaps" in caplog.text


# --- the same model


def test_parameters_are_shared_and_the_state_dict_is_unchanged(te):
    model = models.model(te)
    parameters = dict(model.named_parameters())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    table = convert(te, model, example_inputs=(models.ids(te),))
    assert any("LayerNormLinear" in row.now for row in table)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in parameters)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_state_dicts_load_both_ways(te):
    inputs = models.ids(te)
    plain, converted = models.model(te, seed=1), models.model(te, seed=2)
    convert(te, converted, example_inputs=(inputs,))
    before = {k: v.clone() for k, v in converted.state_dict().items()}
    converted.load_state_dict(plain.state_dict(), strict=True)
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in converted.state_dict().items())
    assert torch.equal(converted.layers[0].self_attn.q_b_proj.layer_norm_weight, plain.layers[0].self_attn.q_norm.weight)
    plain.load_state_dict(before, strict=True)
    converted.load_state_dict(pickle.loads(pickle.dumps(before)), strict=True)
    assert all(torch.equal(v, before[k]) for k, v in converted.state_dict().items())


def test_converted_models_can_be_copied(te):
    model = models.model(te)
    convert(te, model, example_inputs=(models.ids(te),))
    others = [copy.deepcopy(model)]
    if not te.real:  # whose modules keep local functions
        others.append(pickle.loads(pickle.dumps(model)))
    for other in others:
        attention = other.layers[0].self_attn
        assert attention.q_b_proj.layer_norm_weight is attention.q_norm.weight
        assert attention.q_norm.weight is not model.layers[0].self_attn.q_norm.weight
        assert attention.q_b_proj.recipe == "fp8_current"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(2, 16), (3, 7)], ids=["multiples", "padded"])
def test_outputs_and_gradients(te, shape):
    """In the parameters' dtype the modules compute what the linears did. In fp8 they are that far off."""
    model, inputs = models.model(te), models.ids(te, shape)
    want = step(model, inputs)
    convert(te, model, example_inputs=(inputs,))
    with engine.high_precision():
        assert_same(step(model, inputs), want, 3e-2 if te.real else 1e-5)
    assert_same(step(model, inputs), want, 0.3 if te.real else 1e-5)
    no_tokens = torch.zeros(0, 32, device=te.device, dtype=te.dtype)
    assert model.layers[0].mlp.up_proj(no_tokens).shape == (0, 48)


def test_modules_run_in_their_own_recipe(stand_in, state):
    model = models.model(layers=1)
    plan = PrecisionPlan({"*.mlp.*": "fp8_block", "*.self_attn.o_proj": "bf16"}, gate=False)
    replace_linears(model, plan, target="cuda")
    with stand_in.autocast(enabled=False):
        model(models.ids())
    assert state.recipe is None and state.depth == 0
    ran = {(m.out_features, m.in_features, recipe) for m, recipe, _ in state.ran}
    assert (48, 32, "Float8BlockScaling") in ran and (16, 32, "Float8CurrentScaling") in ran
    assert type(model.layers[0].self_attn.o_proj) is nn.Linear
    state.ran.clear()
    with engine.high_precision():
        model(models.ids())
    assert {recipe for _, recipe, _ in state.ran} == {None}


def test_delayed_scaling_moves_on_once_a_step(stand_in, state):
    model = models.model()
    replace_linears(model, PrecisionPlan({"*.mlp.*": "fp8_delayed", "*": "bf16"}, gate=False), target="cuda")
    for _ in range(3):
        model(models.ids())
    assert state.steps == 3 and state.depth == 0
    assert {recipe for _, recipe, _ in state.ran} == {"DelayedScaling"} and state.deepest == 1
    model.layers[0].mlp(torch.randn(16, 32))  # a part by itself
    assert state.ran[-1][1] == "DelayedScaling" and state.depth == 0
    with pytest.raises(IndexError):
        model(torch.tensor([[1 << 20]]))
    assert state.depth == 0 and state.recipe is None


def test_training_mode_is_kept_and_again_changes_nothing(te):
    model = models.model(te).eval()
    model.layers[0].train()
    first = convert(te, model)
    assert not model.layers[1].mlp.up_proj.training and model.layers[0].mlp.up_proj.training
    modules = dict(model.named_modules())
    again = convert(te, model)
    assert dict(model.named_modules()) == modules
    assert again.done == () and again.skipped[first.done[0]] == "replaced before: fp8_current"


def test_assert_plan_of_a_converted_model(te):
    model = models.model(te)
    convert(te, model, example_inputs=(models.ids(te),))
    assert_plan(EVERYTHING, model, target=te.target)
    model.layers[1].mlp.up_proj = nn.Linear(32, 48, bias=False, device=te.device, dtype=te.dtype)
    with pytest.raises(PlanMismatchError) as caught:
        assert_plan(EVERYTHING, model, target=te.target)
    assert caught.value.differences == ("layers.1.mlp.up_proj: the plan says fp8_current by *, Linear holds bf16",)
    with pytest.raises(PlanMismatchError, match="the plan says bf16 by role attention, Linear holds fp8_current"):
        assert_plan(PrecisionPlan.of("bf16"), model, target=te.target)


def test_a_converted_model_compiles_around_its_modules(te, state):
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).to(te.device, te.dtype)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(te.device, te.dtype)
    convert(te, model, PrecisionPlan({"0": "fp8_current"}, gate=False))
    want = step(model, x)
    torch._dynamo.reset()
    got = step(torch.compile(model, backend="eager"), x)
    torch._dynamo.reset()
    assert_same((got[0], {n.removeprefix("_orig_mod."): g for n, g in got[1].items()}), want, 1e-2 if te.real else 1e-5)
    assert te.real or [recipe for _, recipe, _ in state.ran] == ["Float8CurrentScaling"] * 2


def test_meta_models_are_converted_before_they_have_memory(te):
    with torch.device("meta"):
        model = models.Model(1)
    table = convert(te, model)
    assert "layers.0.mlp.up_proj" in table.done
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device=te.device).to(te.dtype).load_state_dict(models.model(te, layers=1).state_dict(), strict=True)
    assert model(models.ids(te)).shape == (2, 16, 64)
