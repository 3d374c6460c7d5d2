"""`replace_linears` on models nobody here wrote: DeepSeek-V3, NemotronH and GraniteMoeHybrid, tiny."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megacpp_compile import PrecisionPlan, explain, replace_linears
from megacpp_compile.precision import engine
from megacpp_compile.precision.survey import assert_plan

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
         "num_key_value_heads": 2, "use_cache": False, "max_position_embeddings": 64}  # fmt: skip
PLAN = PrecisionPlan(gate=False)
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def deepseek():
    config = transformers.DeepseekV3Config(
        **SMALL, moe_intermediate_size=32, num_hidden_layers=2, first_k_dense_replace=1, q_lora_rank=32,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    attention = {f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in MLA}
    dense = {f"model.layers.0.mlp.{name}" for name in MLP} | {f"model.layers.1.mlp.shared_experts.{n}" for n in MLP}
    norms = {f"model.layers.{i}.self_attn.{name}_layernorm" for i in (0, 1) for name in ("q_a", "kv_a")}
    return model, attention | dense, norms


def nemotron():
    config = transformers.NemotronHConfig(
        **SMALL, hybrid_override_pattern="M*-", num_hidden_layers=3, head_dim=32, mamba_num_heads=4,
        mamba_head_dim=16, ssm_state_size=16, n_groups=1, chunk_size=16,
    )  # fmt: skip
    attention = {f"model.layers.1.mixer.{name}_proj" for name in "qkvo"}
    mlp = {f"model.layers.2.mixer.{name}_proj" for name in ("up", "down")}
    return transformers.NemotronHForCausalLM(config), attention | mlp, {"model.layers.2.norm"}


def granite():
    config = transformers.GraniteMoeHybridConfig(
        **SMALL, num_hidden_layers=2, layer_types=["mamba", "attention"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1,
        mamba_chunk_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.GraniteMoeHybridForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    shared = {f"model.layers.{i}.shared_mlp.{name}_linear" for i in (0, 1) for name in ("input", "output")}
    return model, shared | {f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"}, set()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("build", [deepseek, nemotron, granite])
def test_replacement(te, build):
    torch.manual_seed(0)
    model, linears, norms = build()
    model = model.to(te.device, te.dtype).eval()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0)).to(te.device)
    state, wanted = {k: v.clone() for k, v in model.state_dict().items()}, model(input_ids=ids).logits.float()
    every = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear]

    table = replace_linears(model, PLAN, target=te.target, example_inputs={"input_ids": ids})

    assert [row.fqn for row in table if row.role != "norm"] == every
    assert {row.fqn for row in table if row.role != "norm" and row.done} == linears
    assert {row.fqn for row in table if row.role == "norm" and row.done} == norms
    assert table.skipped["lm_head"] == "excluded by 'lm_head'"
    assert_plan(PLAN, model, target=te.target)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    model.load_state_dict(state, strict=True)
    with engine.high_precision(), torch.no_grad():
        got = model(input_ids=ids).logits.float()
    assert (got - wanted).norm() <= (2e-2 if te.real else 1e-5) * wanted.norm()
    with torch.no_grad():  # in fp8
        got = model(input_ids=ids).logits.float()
    assert (got - wanted).norm() <= (0.25 if te.real else 1e-5) * wanted.norm()
    # What was saved from either kind of model loads into the other, bit for bit, after a step too.
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25)
    saved, plain = {k: v.clone() for k, v in model.state_dict().items()}, build()[0].to(te.device, te.dtype).eval()
    plain.load_state_dict(saved, strict=True)
    model.load_state_dict(state, strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    for other in (plain, model):
        assert list(other.state_dict()) == list(saved)
        assert all(torch.equal(v, saved[k]) for k, v in other.state_dict().items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("build", [deepseek, nemotron, granite])
def test_gradients(te, build):
    """Every parameter has the gradient it had, those of folded norms too."""
    torch.manual_seed(0)
    model, _, _ = build()
    model = model.to(te.device, te.dtype)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0)).to(te.device)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradients()
    replace_linears(model, PLAN, target=te.target, example_inputs={"input_ids": ids})
    for recipe, tolerance in (("high precision", 5e-2 if te.real else 1e-4), ("fp8", 1.0 if te.real else 1e-4)):
        with engine.high_precision() if recipe == "high precision" else contextlib.nullcontext():
            got = gradients()
        assert got.keys() == wanted.keys()
        a, b = (torch.cat([g[name].flatten() for name in wanted]) for g in (got, wanted))
        assert a.isfinite().all() and (a - b).norm() <= tolerance * b.norm(), recipe


@pytest.mark.end_to_end
def test_a_compiled_graph_says_what_every_linear_runs_in():
    """All linears of the model are in the report's table; on a CPU it says why none is in fp8."""
    model, linears, _ = deepseek()
    report = explain(model, input_ids=torch.zeros(1, 16, dtype=torch.long), options={"precision": PLAN})
    rows = {row["fqn"]: row for frame in report.frames for row in frame.precision if row["kind"] == "linear"}
    assert {name for name, m in model.named_modules() if type(m) is torch.nn.Linear} <= set(rows)
    assert {name for name, row in rows.items() if row["requested"] != "bf16"} == linears
    assert all(row["effective"] == "fp32" and bool(row["reason"]) == (name in linears) for name, row in rows.items())
    kinds = [row["kind"] for frame in report.frames for row in frame.precision]
    assert kinds.count("attention") == 2 and kinds.count("experts") == 1


@pytest.mark.parametrize("build", [deepseek, nemotron, granite])
def test_no_op_on_cpu(build):
    model, _, _ = build()
    modules = dict(model.named_modules())
    table = replace_linears(model, PLAN)
    assert dict(model.named_modules()) == modules
    assert table.done == () and table.reason == "target cpu: no float8 here"
    assert len(table.rows) == sum(type(m) is torch.nn.Linear for m in modules.values())
