"""Hugging Face's Trainer and accelerate, the packages themselves: one line makes them compile with megacpp."""

from __future__ import annotations

import pytest
import torch

import megacpp_compile

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS = 3
SITES = {"down_norm_up": 2, "mla_rope_kv": 1, "mla_rope_q": 1, "attention": 1}


def model(layers: int = 1) -> torch.nn.Module:
    torch.manual_seed(3)
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=layers, max_position_embeddings=32,
    ))


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, i):
        ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def losses(tmp_path, **how) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=STEPS, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, seed=1, learning_rate=1e-2, disable_tqdm=True, **how,
    )  # fmt: skip
    trainer = transformers.Trainer(model(), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
def test_trainer(no_kernels, tmp_path, how):
    want = losses(tmp_path)
    with megacpp_compile.enable({"strict": True}), megacpp_compile.record() as report:
        got = losses(tmp_path, torch_compile=True, **how)
    assert {name: n for name, n in report.counts.items() if n} == SITES
    assert len(got) == STEPS and got == pytest.approx(want, rel=1e-4)


@pytest.mark.exhaustive
def test_trainer_without_logits(no_kernels, tmp_path):
    """The Trainer reads the loss alone; evaluation reads both."""
    want = losses(tmp_path, eval_strategy="steps", eval_steps=2)
    with megacpp_compile.enable({"strict": True, "drop_outputs": "logits"}), megacpp_compile.record() as report:
        got = losses(tmp_path, torch_compile=True, eval_strategy="steps", eval_steps=2)
    trained = [{s.pass_name for s in report.sites if s.frame == i} for i, f in enumerate(report.frames) if f.grad]
    assert trained and all("linear_cross_entropy" in fired for fired in trained)
    assert len(got) == STEPS and got == pytest.approx(want, rel=1e-4)


@pytest.mark.end_to_end
def test_accelerate(eager_backend, monkeypatch):
    """As `accelerate launch --dynamo_backend inductor` has it."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with megacpp_compile.enable(), megacpp_compile.record() as report:
        prepared = accelerate.Accelerator(cpu=True).prepare(model())
        prepared(torch.arange(12)[None], use_cache=False)
    assert report.counts["mla_rope_q"] == 1


@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("targets", [
    ["q_b_proj", "kv_b_proj", "o_proj"], ["q_a_proj", "kv_a_proj_with_mqa"],
], ids=["up", "down"])
def test_adapters_of_peft(eager_backend, targets, dtype):
    """No projection of latent attention is lost to the path beside it."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model(), peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    ids = torch.arange(24).view(2, 12)
    with megacpp_compile.record() as report:
        torch.compile(adapted.to(dtype), backend="megacpp")(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert {name: n for name, n in report.counts.items() if n} == SITES and len(report.frames) == 1


def test_without_it_the_trainer_refuses_the_name(tmp_path):
    """Why there is `enable`; once this passes by itself, docs/trainers.md can say so."""
    with pytest.raises(ValueError, match=r"(?i)megacpp"):
        losses(tmp_path, torch_compile_backend="megacpp")
