"""A checkpoint against a model, before anything is loaded: widths of latents, missing names, files without MLA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megacpp_compile import apply_checkpoints, check_resume
from megacpp_compile.errors import NotAModuleError, ResumeError

DIM = 64


class Latents(nn.Module):
    """Latent attention; names are of no known model."""

    def __init__(self, kv=16, rope=8, q=24):
        super().__init__()
        self.squeeze, self.scale, self.widen = nn.Linear(DIM, kv + rope, bias=False), nn.RMSNorm(kv), nn.Linear(kv, 128)
        self.ask, self.ask_scale, self.ask_wide = nn.Linear(DIM, q), nn.RMSNorm(q), nn.Linear(q, 96)
        self.out = nn.Linear(64, DIM)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, n) for n in (64, 32, 32, DIM))
        self.q_norm = nn.RMSNorm(16)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attn = nn.RMSNorm(DIM), attention
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.RMSNorm(4 * DIM), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self, attention=Latents, layers=3, **widths):
        super().__init__()
        self.embed = nn.Embedding(10, DIM)
        self.layers = nn.ModuleList(Layer(attention(**widths)) for _ in range(layers))
        self.head = nn.Linear(DIM, 10, bias=False)
        self.register_buffer("steps", torch.zeros(()))


def test_a_checkpoint_of_the_same_widths_fits():
    model = Model()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = check_resume(model, Model().state_dict())
    assert found.tensors == len(before) and not found.unexpected
    kinds = {(x.down, x.width, x.beside, x.hidden) for x in found.latents}
    assert kinds == {("squeeze.weight", 16, 8, DIM), ("ask.weight", 24, 0, DIM)} and len(found.latents) == 6
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()), "nothing is loaded"


def test_two_latents_of_one_width():
    """Then the order tells which projection belongs to which norm."""
    found = check_resume(model := Model(kv=24, rope=0, q=24, layers=2), model.state_dict())
    assert [x.down for x in found.latents[:2]] == ["ask.weight", "squeeze.weight"]
    found = check_resume(model := Model(Whole), model.state_dict())
    assert found.latents == (), "nothing else is taken for one"


def test_latents_of_a_model_nobody_here_wrote():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, vocab_size=32, first_k_dense_replace=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    found = check_resume(model, model.state_dict()).latents
    assert {(x.width, x.beside) for x in found} == {(16, 8), (24, 0)} and len(found) == 4


@pytest.mark.parametrize(("widths", "said"), [
    ({"kv": 32}, r"the model has ask.weight \(24, 64\), squeeze.weight \(16 \+ 8, 64\); "
                 r"the checkpoint has ask.weight \(24, 64\), squeeze.weight \(32 \+ 8, 64\)"),
    ({"rope": 16}, r"squeeze.weight \(16 \+ 16, 64\)"), ({"q": 48}, r"the checkpoint has ask.weight \(48, 64\)"),
])  # fmt: skip
def test_other_widths_are_named_on_both_sides(widths, said):
    with pytest.raises(ResumeError, match=said) as caught:
        check_resume(Model(), Model(**widths).state_dict())
    assert "latent attention of layers.0.attn and 2 more" in str(caught.value)
    assert caught.value.differing and not caught.value.missing and "nothing was loaded" in str(caught.value)


def test_a_checkpoint_without_mla():
    with pytest.raises(ResumeError) as caught:
        check_resume(Model(), Model(Whole).state_dict())
    text = str(caught.value)
    assert "the model has ask.weight (24, 64), squeeze.weight (16 + 8, 64)" in text
    assert "the checkpoint has no latents there, but q.weight (64, 64)" in text and "k.weight (32, 64)" in text
    assert "missing: layers.0.attn.squeeze.weight (24, 64)" in text and "and 21 more" in text
    assert "layers.2.attn.widen.weight" in caught.value.missing
    assert "layers.2.attn.v.bias" in caught.value.unexpected


@pytest.mark.parametrize(("model", "other", "said"), [
    ((Whole,), {}, r"the model has no latents there, but q.weight \(64, 64\)"),
    ((), {"layers": 2}, "the checkpoint has no such module"),
], ids=["model without MLA", "fewer layers"])  # fmt: skip
def test_modules_that_one_side_lacks(model, other, said):
    with pytest.raises(ResumeError, match=said):
        check_resume(Model(*model), Model(**other).state_dict())


def test_other_tensors_count_too():
    state = Model().state_dict()
    state["head.weight"] = torch.zeros(11, DIM)
    del state["steps"]
    with pytest.raises(ResumeError, match=r"head.weight \(10, 64\) here, \(11, 64\) there") as caught:
        check_resume(Model(), state)
    assert caught.value.missing == ("steps",) and "latent" not in str(caught.value)


def test_names_that_the_model_does_not_have():
    state = {**Model().state_dict(), "old.weight": torch.zeros(2), "layers.0.attn.squeeze._extra_state": b"bytes"}
    with pytest.raises(ResumeError, match=r"of no parameter here: old.weight \(2\)"):
        check_resume(Model(), state)
    assert check_resume(Model(), state, strict=False).unexpected == ("old.weight",)


def test_a_tied_parameter_may_be_there_once():
    model = Model()
    model.head.weight = model.embed.weight
    state = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    assert check_resume(model, state).tensors == len(state)


def test_wrappers_and_devices_do_not_matter():
    with torch.device("meta"):
        model = Model()
    apply_checkpoints(model)
    for wrapper in ("", "module.", "_orig_mod."):
        state = {f"{wrapper}{n}": t for n, t in Model().state_dict().items()}
        assert len(check_resume(model, state).latents) == 6
    with pytest.raises(NotAModuleError):
        check_resume({}, {})
