"""`MegacppCallback`: transformers' Trainer compiles with megacpp, logs what it did, and makes no logits for nobody."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import megacpp_compile
from megacpp_compile.errors import AlreadyCompiledError
from megacpp_compile.frontend.dropped_outputs import DroppedOutput
from tests.trainers.test_hugging_face import SITES, STEPS, Tokens, model

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from megacpp_compile.integrations import transformers as ours  # noqa: E402
from megacpp_compile.integrations.training import logits_variables, prepare  # noqa: E402
from megacpp_compile.integrations.transformers import MegacppCallback, logits_are_read  # noqa: E402


def trainer(tmp_path, *callbacks, kind=transformers.Trainer, net=None, more=None, **how):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=STEPS, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, seed=1, learning_rate=1e-2, disable_tqdm=True, **how,
    )  # fmt: skip
    return kind(
        net or model(), arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=list(callbacks), **more or {}
    )


def losses(trained) -> list[float]:
    trained.train()
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


@pytest.mark.end_to_end
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", [1, 4], ids=["whole", "blocks"])
@pytest.mark.parametrize("how", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_training(no_kernels, tmp_path, caplog, layers, how):
    want = losses(trainer(tmp_path, net=model(layers), **how))
    callback = MegacppCallback({"strict": True}, blocks=layers > 1)
    seen = []
    more = {"compute_metrics": lambda p: seen.append(p.predictions.shape) or {"top": float(np.mean(p.predictions[0]))}}
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        trained = trainer(tmp_path, callback, net=model(layers), more=more, eval_strategy="steps", eval_steps=2, **how)
        got = losses(trained)
    assert got == pytest.approx(want, rel=2e-2 if how else 1e-4) and len(got) == STEPS
    assert callback.report.counts["linear_cross_entropy"] == 1
    # Of blocks one stands for all; their attention reads its mask as data, which stays with the kernel of torch's.
    wanted = SITES if layers == 1 else SITES | {"attention": 0}
    assert {name: callback.report.counts[name] for name in SITES} == wanted
    assert layers == 1 or any(len(region.fqns) == layers for region in callback.report.regions)
    assert seen and seen[0][1:] == (12, 64)
    assert trained.predict(Tokens()).predictions.shape == (2 * STEPS, 12, 64)
    (row,) = [row for row in trained.state.log_history if "megacpp/sites" in row]
    assert row["step"] == 1 and row["megacpp/sites"] == len(callback.report.sites)
    assert row["megacpp/saved_bytes"] > 0 and row["megacpp/compile_seconds"] > 0
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert [m for m in said if "logits are not made in training" in m] and [m for m in said if "sites fused" in m]


@pytest.fixture
def prepared(monkeypatch):
    """What `prepare` is asked for; nothing is compiled."""
    asked = []
    monkeypatch.setattr(ours, "prepare", lambda model, options, **how: asked.append(how))
    return asked


class ReadsLogits(transformers.Trainer):
    """As trl's SFTTrainer does for its accuracy."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        assert outputs.logits.argmax(-1).shape == inputs["labels"].shape
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OwnStep(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


def own_loss(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().logsumexp(-1).mean()


@pytest.mark.parametrize(("how", "why"), [
    ({}, ""),
    ({"more": {"compute_metrics": lambda p: {}, "preprocess_logits_for_metrics": lambda logits, labels: logits}}, ""),
    ({"label_smoothing_factor": 0.1}, "label smoothing"),
    ({"more": {"compute_loss_func": own_loss}}, "compute_loss_func"),
    ({"kind": ReadsLogits}, "ReadsLogits has a compute_loss"),
    ({"kind": OwnStep}, "OwnStep has a training_step"),
], ids=["plain", "metrics", "smoothing", "compute_loss_func", "compute_loss", "training_step"])  # fmt: skip
def test_reasons_to_keep_logits(prepared, tmp_path, caplog, how, why):
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        trainer(tmp_path, MegacppCallback(), **how).train()
    assert prepared == [{"blocks": False, "drop_logits": not why}]
    (said,) = [r.getMessage() for r in caplog.records if "logits" in r.getMessage()]
    assert why in said and ("stay in training" if why else "not made in training") in said


def test_other_reasons(tmp_path):
    plain = trainer(tmp_path)
    assert logits_are_read(plain) == "" and "not known" in logits_are_read(None)
    plain.compute_loss = lambda *args, **how: None
    assert "compute_loss of its own" in logits_are_read(plain)
    del plain.compute_loss
    plain.accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(sp_enabled=True))
    assert "sequence parallelism" in logits_are_read(plain)


def test_variables_of_logits():
    """Found in the forward, as models name them differently; not in one that returns none beside a loss."""
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    assert logits_variables(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))) == ("lm_logits",)
    assert logits_variables(model()) == logits_variables(nn.DataParallel(model())) == ("logits",)
    assert logits_variables(nn.Linear(2, 2)) == ()


def test_a_model_without_logits_is_said(prepared, tmp_path, caplog):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, input_ids, labels):
            return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}

    with caplog.at_level(logging.INFO, "megacpp_compile"):
        trainer(tmp_path, MegacppCallback(), net=Alone()).train()
    assert prepared[0]["drop_logits"] is False and "Alone returns as logits" in caplog.text


@pytest.mark.parametrize("how", [{"torch_compile": True, "torch_compile_backend": "eager"}, {}], ids=["Trainer", "accelerate"])
def test_the_trainer_s_own_compilation_is_refused(prepared, tmp_path, monkeypatch, how):
    if not how:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(AlreadyCompiledError):
        trainer(tmp_path, MegacppCallback(), **how).train()
    assert not prepared


def test_figures_reach_what_the_trainer_logs_to(prepared, tmp_path):
    """TensorBoard's and W&B's callbacks among them, which stand before ours; the step's own row is logged, too."""
    rows = []

    class Sees(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            rows.append((state.global_step, set(logs)))

    trainer(tmp_path, Sees(), MegacppCallback()).train()
    ours, loss, *others = rows
    assert ours[0] == 1 and {"megacpp/sites", "megacpp/saved_bytes", "megacpp/compile_seconds"} < ours[1]
    assert loss[0] == 1 and "loss" in loss[1] and not [r for _, r in others if "megacpp/sites" in r]


def test_a_second_training_goes_on_with_the_first_s_model(prepared, tmp_path):
    again = trainer(tmp_path, callback := MegacppCallback())
    again.train()
    first = callback.report
    again.train()
    assert len(prepared) == 1 and callback.report is not first


@pytest.mark.end_to_end
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", [1, 4], ids=["whole", "blocks"])
def test_in_a_loop_of_one_s_own(no_kernels, layers):
    """With accelerate; evaluation has its logits with gradients, too."""
    import accelerate

    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    net = model(layers)
    want = net(**batch)
    net = prepare(net, {"drop_outputs": "hidden"}, blocks=layers > 1)
    prepared = accelerate.Accelerator(cpu=True).prepare(net)
    with megacpp_compile.record() as report:
        out = prepared(**batch)
        out.loss.backward()
    assert report.counts["linear_cross_entropy"] == 1 and isinstance(out.logits, DroppedOutput)
    torch.testing.assert_close(out.loss, want.loss)
    prepared.eval()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(prepared(**batch).logits, want.logits)


@pytest.mark.end_to_end
@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
@pytest.mark.parametrize("layers", [1, 4], ids=["whole", "blocks"])
def test_inside_of_wrappers(no_kernels, one_rank, wrap, layers):
    """Which come behind it, as accelerate's do."""
    from torch.distributed.fsdp import fully_shard

    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    want = model(layers)(**batch)
    net = prepare(model(layers), blocks=layers > 1)
    if wrap == "DDP":
        net = nn.parallel.DistributedDataParallel(net)
    else:
        for layer in net.model.layers:
            fully_shard(layer, mesh=one_rank)
        fully_shard(net, mesh=one_rank)
    with megacpp_compile.record() as report:
        out = net(**batch)
        out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want.loss.detach())
    assert report.counts["linear_cross_entropy"] == 1 and report.counts["mla_rope_q"]
    net.eval()
    torch.testing.assert_close(net(**batch).logits, want.logits)


@pytest.mark.end_to_end
def test_generation_is_eager_s(no_kernels):
    net, ids = model().eval(), torch.arange(6)[None]
    want = net.generate(ids, max_new_tokens=4, do_sample=False)
    with megacpp_compile.record() as report:
        got = prepare(net).generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, want) and not report.frames


@pytest.mark.end_to_end
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", [1, 4], ids=["whole", "blocks"])
def test_adapters(no_kernels, tmp_path, layers):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(4)
        return peft.get_peft_model(model(layers), peft.LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM"))

    want = losses(trainer(tmp_path, net=adapted()))
    callback = MegacppCallback(blocks=layers > 1)
    got = losses(trainer(tmp_path, callback, net=adapted(), gradient_checkpointing=True))
    assert got == pytest.approx(want, rel=1e-4)
    assert callback.report.counts["linear_cross_entropy"] == 1
