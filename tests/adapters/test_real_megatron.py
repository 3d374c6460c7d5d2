"""The adapters on Megatron-Core itself, where it is installed: its GPT model with MLA, on one rank without a GPU."""

from __future__ import annotations

import functools
import importlib.metadata

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import megacpp_compile
from megacpp_compile.adapters.megatron import adapt_spec, adapter, attention_layer_spec, plain_mla

from .fake_megatron import Core as Attends
from .fake_megatron import fired, off_one
from .test_plain_mla import same as within

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (pip install megatron-core einops)")
if torch.cuda.is_available():
    why = "half of Megatron's modules ask for the current CUDA device: hide it (CUDA_VISIBLE_DEVICES=)"
    pytest.skip(why, allow_module_level=True)

B, S, WORDS = 2, 16, 256


@pytest.fixture
def megatron(monkeypatch, tmp_path):
    """Its parallel state on one rank, and its rotary modules on CPU, which ask for the current CUDA device."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import multi_latent_attention

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    if not isinstance(multi_latent_attention.TELinear, type):  # a mock, which it takes for Transformer Engine
        monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


class Core(Attends):
    """Megatron's own core takes no widths of MLA's; Transformer Engine's needs a GPU."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **kwargs):
        super().__init__(config, softmax_scale)

    def forward(self, query, key, value, attention_mask, **kwargs):
        return super().forward(query, key, value, attention_mask, None)


def configuration(**fields):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(**{
        "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 224,
        "use_cpu_initialization": True, "normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": nn.functional.silu, "attention_dropout": 0.0, "hidden_dropout": 0.0, "q_lora_rank": 96,
        "kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 40, "rope_type": "rope",
        "rotary_scaling_factor": 4.0, "apply_rope_fusion": False, "original_max_position_embeddings": 32,
        "bias_dropout_fusion": False, "bias_activation_fusion": False, "gradient_accumulation_fusion": False,
        "persist_layer_norm": False, **fields,
    })


def layer_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Core
    return spec


def made(spec=None, mtp_block_spec=None, **fields):
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(0)
    return off_one(GPTModel(
        config=configuration(**fields), transformer_layer_spec=spec or layer_spec(), vocab_size=WORDS,
        mtp_block_spec=mtp_block_spec, max_sequence_length=64, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).float())  # fmt: skip


def predicting():
    """The model with a layer that predicts one token more."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = configuration(mtp_num_layers=1, mtp_loss_scaling_factor=0.3)
    block = get_gpt_mtp_block_spec(config, layer_spec(), use_transformer_engine=False)
    return made(mtp_block_spec=block, mtp_num_layers=1, mtp_loss_scaling_factor=0.3)


def step(model, call=None):
    model.zero_grad()
    ids = torch.randint(0, WORDS, (B, S), generator=torch.Generator().manual_seed(1))
    places = torch.arange(S).expand(B, S)
    mask = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
    loss = (model if call is None else call)(ids, places, mask, labels=ids.roll(-1, 1))
    loss.square().mean().backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


same = functools.partial(within, bound=1e-5)


@pytest.mark.parametrize("fields", [
    {}, {"q_lora_rank": None}, {"rope_type": "yarn"}, {"bias_dropout_fusion": True, "bias_activation_fusion": True},
], ids=["rope", "no_q_lora", "yarn", "fusions"])
def test_a_model_is_one_graph_with_every_site(megatron, no_kernels, fields):
    model = made(**fields)
    want, state = step(model), {k: v for k, v in model.state_dict().items() if v is not None}
    table = plain_mla(model)
    assert not table.left
    same(step(model), want)
    after = {k: v for k, v in model.state_dict().items() if v is not None}
    assert list(after) == list(state) and all(after[k].data_ptr() == v.data_ptr() for k, v in state.items())
    counters.clear()  # Megatron compiles its fusions
    with megacpp_compile.record() as report:
        got = step(model, torch.compile(model, backend="megacpp"))
    same(got, want)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    latents = 4 if fields.get("q_lora_rank", 1) else 2
    assert fired(report) == {"down_norm_up": latents, "mla_rope_q": 2, "mla_rope_kv": 2, "linear_cross_entropy": 1}


def test_blocks_share_an_artifact(megatron, no_kernels):
    model = made(num_layers=4)
    want = step(model)
    plain_mla(model)
    with megacpp_compile.record() as report:
        megacpp_compile.compile(model)
        same(step(model), want)
    assert all(frame.captured for frame in report.frames)  # of one block, and of the loss
    assert fired(report) == {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1, "linear_cross_entropy": 1}


def test_checkpoints_of_megatron_go_in_and_out(megatron):
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    one, other = made(), made()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    metadata = ensure_metadata_has_dp_cp_group(None)

    def sharded():
        return {n: getattr(part, "key", None) for n, part in one.sharded_state_dict(metadata=metadata).items()}

    before = sharded()
    plain_mla(one)
    assert sharded() == before and any(before.values())
    one.load_state_dict(other.state_dict())
    same(step(one), step(other))


def test_a_model_of_adapters_is_the_model(megatron, no_kernels):
    want, done = step(made()), adapt_spec(layer_spec())
    assert done.replaced == ("self_attention: MLASelfAttention",)
    model = made(done.spec)
    attention = model.decoder.layers[0].self_attention
    assert type(attention) is adapter("MLASelfAttention") and attention.makes_tables
    assert list(model.state_dict()) == list(made().state_dict())
    same(step(model), want)
    plain_mla(model)
    with megacpp_compile.record() as report:
        same(step(model, torch.compile(model, backend="megacpp")), want)
    assert counters["stats"]["unique_graphs"] == 1 and report.counts["down_norm_up"] == 4


def test_a_layer_of_attention_alone(megatron):
    from megatron.core.transformer.spec_utils import build_module

    spec = attention_layer_spec("local", qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Core
    layer = build_module(spec, config=configuration(), layer_number=1)
    assert not any("mlp" in name for name, _ in layer.named_parameters())
    x = torch.randn(S, B, 128)
    out = layer(hidden_states=x, attention_mask=None)[0]
    normed, tables = layer.input_layernorm(x), torch.ones(S, 1, 1, 16)
    want = x + layer.self_attention(normed, None, rotary_pos_emb=tables)[0]  # a table that is not applied
    torch.testing.assert_close(out, want)


def test_the_release_is_the_one_documented():
    assert importlib.metadata.version("megatron-core").split(".")[:2] == ["0", "16"]


def test_multi_token_prediction_is_one_graph_with_every_site(megatron, no_kernels):
    model = predicting()
    want, table = step(model), plain_mla(model)
    assert not table.left
    same(step(model), want)
    # Inductor's pattern of attention with a mask fails on these sizes, without this backend too (torch 2.13).
    with torch._inductor.config.patch(pattern_matcher=False), megacpp_compile.record() as report:
        got = step(model, torch.compile(model, backend="megacpp"))
    same(got, want)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert fired(report) == {"down_norm_up": 6, "mla_rope_q": 3, "mla_rope_kv": 3, "linear_cross_entropy": 2}
