"""`use_latent_cache`: models of transformers generate the tokens they generate with their own cache, and what is not
latent attention is refused with the reason. With caches of their own, which hold latents, each compiled step takes the
absorbed form, and they generate eager's tokens."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import megacpp_compile
from megacpp_compile.decode import transformers_cache
from megacpp_compile.errors import AbsorbedInTrainingError, CacheError, LatentCacheError
from tests.lowerings import relative_error

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

NAMES = {"v2": "DeepseekV2", "v3": "DeepseekV3", "llama": "Llama"}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "first_k_dense_replace": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def made(which="v3", dtype=torch.float32, **more):
    torch.manual_seed(3)
    name, sizes = NAMES.get(which, which), {**SIZES, "q_lora_rank": None if which == "v2" else 12}
    if which == "llama":
        sizes = {key: size for key, size in SIZES.items() if "rank" not in key and "_head_dim" not in key}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()


def generated(model, ids, n=12, **more):
    return model.generate(ids, max_new_tokens=n, do_sample=False, eos_token_id=None, **more)


def prompt(batch=2, n=5):
    return torch.randint(1, 64, (batch, n))


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("which", "form"), [
    ("v2", "auto"), ("v2", "expanded"), ("v3", "absorbed"), ("v3", "expanded"), ("Youtu", "auto"), ("MiniCPM3", "auto"),
    ("Glm4MoeLite", "auto"),
])
def test_generates_the_same_tokens(which, form):
    model, ids = made(which), prompt()
    want = generated(model, ids)
    cache = megacpp_compile.use_latent_cache(model, batch=2, capacity=17, form=form)
    assert torch.equal(generated(model, ids, past_key_values=cache), want)
    assert cache.latents.length == 16  # the last token is not fed back
    cache.reset()
    assert torch.equal(generated(model, ids, past_key_values=cache), want)
    assert torch.equal(generated(model, ids), want), "its own cache serves as before"


@torch.no_grad()
def test_logits_of_each_step():
    """As near to a full forward as its own cache's; the rows are the normed latent and the rotated row, of its bytes."""
    model, ids = made(), prompt(n=12)
    want = model(ids).logits
    cache = megacpp_compile.use_latent_cache(model, batch=2, capacity=12)
    got = [model(ids[:, :4], past_key_values=cache).logits]
    got += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(4, 12)]
    assert relative_error(torch.cat(got, 1), want) < 1e-5
    own = model(ids, use_cache=True).past_key_values
    for i in range(2):
        latent, rope = cache.latents.prefix(i)
        torch.testing.assert_close(latent, own.layers[i].keys.squeeze(1))
        torch.testing.assert_close(rope.transpose(1, 2), own.layers[i].values)
    assert cache.latents.nbytes() == 2 * 2 * 12 * (16 + 4) * 4


@torch.no_grad()
def test_in_half_precision():
    ids = prompt(n=12)
    want, low = made(dtype=torch.float64)(ids).logits, made(dtype=torch.bfloat16)
    eager = relative_error(low(ids).logits, want)
    cache = megacpp_compile.use_latent_cache(low, batch=2, capacity=12)
    got = torch.cat([low(ids[:, i : i + 1], past_key_values=cache).logits for i in range(12)], 1)
    assert relative_error(got, want) < 1.25 * eager


@torch.no_grad()
@pytest.mark.parametrize(("codec", "least"), [("fp8", 1e-3), ("turboquant", 5e-3), ({1: "polarquant"}, 5e-3)])
def test_with_rows_of_fewer_bits(codec, least):
    """Random weights: attention hardly matters to logits, so its own output is looked at."""
    model, ids, outs = made(qk_rope_head_dim=16), prompt(n=12), []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: outs.append(args[0]))
    for kind in (None, codec):
        cache = megacpp_compile.use_latent_cache(model, batch=2, capacity=12, codec=kind)
        outs.clear()
        model(ids[:, :11], past_key_values=cache)
        model(ids[:, 11:], past_key_values=cache)
        want = outs[-1] if kind is None else want  # noqa: F821
    assert least < relative_error(outs[-1], want) < 0.4 and cache.latents.formats[1].name in cache.report()


@torch.no_grad()
def test_weights_loaded_later_are_the_ones_used():
    model, ids = made(), prompt()
    cache = megacpp_compile.use_latent_cache(model, batch=2, capacity=17)
    for p in model.parameters():
        p.copy_(torch.randn_like(p) / 8)
    want = generated(model, ids)
    assert torch.equal(generated(model, ids, past_key_values=cache), want)


def test_asked_for_twice_it_hooks_once():
    model, ids = made(), prompt()
    want = generated(model, ids)
    first, second = (megacpp_compile.use_latent_cache(model, batch=2, capacity=17) for _ in range(2))
    up = first.plans[0].up
    assert len(up._forward_pre_hooks) == 1 and second.plans[0] is first.plans[0]
    assert torch.equal(generated(model, ids, past_key_values=first), want)
    assert torch.equal(generated(model, ids, past_key_values=second), want)


def test_looking_leaves_the_model_as_it_was():
    model = made().train()
    model.model.layers[0].eval()
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    megacpp_compile.use_latent_cache(model, batch=1, capacity=8)
    assert torch.equal(torch.get_rng_state(), state) and [m.training for m in model.modules()] == modes
    assert not model.lm_head._forward_hooks and model.config._attn_implementation == transformers_cache.NAME


def test_it_trains_as_before():
    model, ids = made(), prompt()
    results = []
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        megacpp_compile.use_latent_cache(model, batch=2, capacity=8)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.end_to_end
@torch.no_grad()
def test_one_graph_serves_64_steps(no_kernels):
    model, ids = made(num_hidden_layers=1), prompt(1, 70)
    want = model(ids).logits[:, 5:]
    cache = megacpp_compile.use_latent_cache(model, batch=1, capacity=70)
    model(ids[:, :5], past_key_values=cache)
    compiled = torch.compile(model, backend="megacpp", options={"strict": True}, fullgraph=True)
    first = compiled(ids[:, 5:6], past_key_values=cache).logits
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = [first, *(compiled(ids[:, i : i + 1], past_key_values=cache).logits for i in range(6, 70))]
    assert relative_error(torch.cat(got, 1), want) < 1e-5
    assert graphs == counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["latents", "static", "dynamic"])
def test_generate_compiled(eager_backend, kind):
    model, ids = made(num_hidden_layers=1), prompt()
    want, more = generated(model, ids, n=4), {} if kind == "latents" else {"cache_implementation": kind}
    if kind == "latents":
        more["past_key_values"] = megacpp_compile.use_latent_cache(model, batch=2, capacity=17)
    model.forward = torch.compile(model.forward, backend="megacpp")
    assert torch.equal(generated(model, ids, n=4, **more), want)


def test_report_has_a_line_for_each_layer():
    cache = megacpp_compile.use_latent_cache(made(), batch=1, capacity=64)
    lines = cache.report().splitlines()
    assert len(lines) == 2
    absorbed, expanded = 2 * (16 * 14 + 64 * 36), 2 * 64 * (16 * 14 + 18)
    counts = f"{absorbed} multiply-adds absorbed, {expanded} expanded"
    assert lines[0] == f"layer 0: absorbed by counts: {counts}; {64 * 20 * 4} bytes of plain rows"
    assert cache.report(1000).startswith("layer 0: expanded by counts")


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: nn.Linear(2, 2), "it is no model of transformers, and has no positions"),
    (lambda: made("DeepseekV32"), "a forward over three tokens failed: ValueError.*update_indexer"),
    (lambda: made("llama"), r"layer 0 \(LlamaAttention\).*no projection in it makes keys and values"),
    (lambda: made(attn_implementation="eager"), "its attention is 'eager', not 'sdpa'"),
], ids=["plain", "with_an_indexer", "llama", "eager"])
def test_models_without_latents(make, reason):
    with pytest.raises(LatentCacheError, match=reason):
        megacpp_compile.use_latent_cache(make(), batch=1, capacity=8)


def test_padding_beams_rollbacks_too_many_tokens_training_and_biases():
    model, ids = made(), prompt()
    cache = megacpp_compile.use_latent_cache(model, batch=2, capacity=17)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.raises(CacheError, match="without padding.*prompts of one length"):
        generated(model, ids, past_key_values=cache, attention_mask=mask)
    cache = megacpp_compile.use_latent_cache(made(), batch=1, capacity=17)
    with pytest.raises(CacheError, match="beams"):
        cache.reorder_cache(torch.zeros(1, dtype=torch.long))
    with pytest.raises(CacheError, match="assisted decoding"):
        cache.crop(1)
    model, ids = made(), prompt(1)
    cache = megacpp_compile.use_latent_cache(model, batch=1, capacity=8)
    with pytest.raises(CacheError, match="at most 8 tokens, found 9"):
        generated(model, ids, past_key_values=cache)
    model = made()
    cache = megacpp_compile.use_latent_cache(model, batch=1, capacity=8)
    with pytest.raises((CacheError, AbsorbedInTrainingError), match="no_grad"):
        model(prompt(1), past_key_values=cache)
    model = made()
    model.model.layers[1].self_attn.kv_b_proj.bias = nn.Parameter(torch.ones(2 * 14))
    with pytest.raises(LatentCacheError, match=r"layer 1 .*the projection of the latent has a bias"):
        megacpp_compile.use_latent_cache(model, batch=1, capacity=8)


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("which", "kind"), [("v2", "static"), ("v3", "dynamic")])
@torch.no_grad()
def test_caches_of_its_own_generate_the_tokens_of_eager(which, kind, no_kernels):
    model, ids = made(which), prompt()

    def cache():
        if kind == "dynamic":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=17)

    want = generated(model, ids, past_key_values=cache())
    with megacpp_compile.record() as report:
        model.compile(backend="megacpp", options={"strict": True})
        assert torch.equal(generated(model, ids, past_key_values=cache()), want)
    assert all(frame.captured for frame in report.frames)
    steps = [frame for frame in report.frames if frame.passes["mla_decode"]]
    assert steps and {frame.passes["mla_decode"] for frame in steps} == {2}, report.misses
    assert all(site.note.startswith("absorbed by counts") for site in report.sites if site.pass_name == "mla_decode")


@pytest.mark.end_to_end
@torch.no_grad()
def test_a_static_cache_is_one_graph_for_64_steps(no_kernels):
    model, ids = made(num_hidden_layers=1), prompt(1, 70)
    eager, own = (transformers.StaticCache(config=model.config, max_cache_len=70) for _ in range(2))
    for one in (eager, own):
        model(ids[:, :5], past_key_values=one)
    compiled = torch.compile(model, backend="megacpp", options={"strict": True})

    def step(called, at, past):
        place = torch.tensor([at])
        return called(ids[:, at : at + 1], past_key_values=past, cache_position=place, position_ids=place[None]).logits

    with megacpp_compile.record() as report:
        got = [step(compiled, 5, own)]
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        got += [step(compiled, at, own) for at in range(6, 70)]
    assert report.counts["mla_decode"] == 1, report.misses
    assert graphs == counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for at, logits in zip(range(5, 70), got, strict=True):
        torch.testing.assert_close(logits, step(model, at, eager), msg=lambda m, at=at: f"step {at}: {m}")
