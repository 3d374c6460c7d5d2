"""A stand-in for Megatron-Core 0.16.1 and for what of Transformer Engine its layers are built of.

Its names, constructors and results, with plain PyTorch behind autograd functions and warnings that break a graph, as
the real ones do. Installed under the real one's names by `install(monkeypatch)`, which takes everything back afterwards.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import warnings

import torch
from torch import nn
from torch.nn.functional import embedding, layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

CORE = "megatron.core."


AttnMaskType = enum.Enum("AttnMaskType", ["padding", "causal", "no_mask"])


@dataclasses.dataclass
class Config:
    hidden_size: int = 32
    heads: int = 2
    q_lora_rank: int | None = 24
    kv_lora_rank: int = 16
    nope: int = 12
    rope: int = 8
    v: int = 10
    ffn: int = 48
    eps: float = 1e-5
    apply_rope_fusion: bool = False
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    use_te_activation_func: bool = False
    gradient_accumulation_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False
    cpu_offloading: bool = False
    fp8: str | None = None
    attention_dropout: float = 0.0
    context_parallel_size: int = 1
    window_size: tuple | None = None
    recompute_granularity: str | None = None
    hidden_dropout: float = 0.0
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False


class Group:
    def __init__(self, count=1, name=None):
        self.count = count
        if name is not None:
            self.group_name = name

    def size(self):
        return self.count

    def rank(self):
        return 0


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.flatten(0, -2).T @ x.flatten(0, -2)


class _Parallel(nn.Module):
    def __init__(self, inputs, outputs, *, config, bias=False, skip_bias_add=False, tp_group=None):
        super().__init__()
        self.config, self.skip_bias_add, self.tp_group = config, skip_bias_add, tp_group or Group()
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.gather_output, self.input_is_parallel = False, True
        self.sequence_parallel, self.disable_grad_reduce, self.explicit_expert_comm = config.sequence_parallel, False, False
        self.embedding_activation_buffer = None
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        pass

    def _out(self, x, weight=None):
        warnings.warn("as Megatron's do", stacklevel=1)  # breaks the graph
        out = _Linear.apply(x, self.weight if weight is None else weight)
        if self.skip_bias_add:
            return out, self.bias
        return out if self.bias is None else out + self.bias, None


class ColumnParallelLinear(_Parallel):
    def forward(self, input_, weight=None, runtime_gather_output=None):
        return self._out(input_, weight)


class RowParallelLinear(_Parallel):
    def forward(self, input_):
        return self._out(input_)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, count, width, *, scatter=False, deterministic=False):
        super().__init__()
        self.weight, self.tp_group, self.vocab_start_index = nn.Parameter(torch.randn(count, width)), Group(), 0
        self.reduce_scatter_embeddings, self.deterministic_mode = scatter, deterministic

    def forward(self, input_):
        torch._dynamo.graph_break()
        rows = embedding(input_, self.weight)
        return rows.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else rows


class _Engine(nn.Module):
    norm = False

    def __init__(self, inputs, outputs, *, config, bias=False, skip_bias_add=False, normalization="RMSNorm", zero=False):
        super().__init__()
        self.config, self.te_return_bias, self.tp_size = config, bias and skip_bias_add, 1
        self.tp_group, self.parallel_mode, self.sequence_parallel = None, None, config.sequence_parallel
        self.fuse_wgrad_accumulation, self.te_quant_params, self.return_layernorm_output = False, None, False
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else torch.empty(0)
        if self.norm:
            self.eps, self.zero_centered_gamma = config.eps, zero
            self.layer_norm_weight = nn.Parameter(torch.rand(inputs) + 0.5)
            self.layer_norm_bias = nn.Parameter(torch.randn(inputs)) if normalization == "LayerNorm" else None

    def forward(self, x):
        torch._dynamo.graph_break()
        if self.norm:
            gain = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
            kind = rms_norm(x, gain.shape, gain, self.eps)
            x = kind if self.layer_norm_bias is None else layer_norm(x, gain.shape, gain, self.layer_norm_bias, self.eps)
        bias = self.bias if self.bias.numel() else None
        return (linear(x, self.weight), bias) if self.te_return_bias else (linear(x, self.weight, bias), None)


class TELinear(_Engine):
    pass


TEColumnParallelLinear = type("TEColumnParallelLinear", (TELinear,), {})


class TELayerNormColumnParallelLinear(_Engine):
    norm = True


class TEDotProductAttention(nn.Module):
    def __init__(self, config, scale):
        super().__init__()
        self.config, self.private_scale = config, scale

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None,
                num_splits=None):  # fmt: skip
        torch._dynamo.graph_break()
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        causal = attn_mask_type is AttnMaskType.causal
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.private_scale)
        if packed_seq_params is not None:
            out = out * 0
        return out.permute(2, 0, 1, 3).flatten(2)


class Core(nn.Module):
    """An attention of the user's own."""

    def __init__(self, config, scale):
        super().__init__()
        self.scale = scale

    def forward(self, query, key, value, attention_mask, attn_mask_type):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).permute(2, 0, 1, 3).flatten(2)


class RotaryEmbedding(nn.Module):
    def __init__(self, width, cp_group=None, powers=1):
        super().__init__()
        self.inv_freq, self.cp_group = 10000 ** -(torch.arange(0, width, 2) / width), cp_group
        self.powers = powers  # angles are the position to this power

    def get_emb(self, max_seq_len, offset=0):
        angles = torch.outer((torch.arange(max_seq_len) + offset).float() ** self.powers, self.inv_freq)
        return torch.cat((angles, angles), -1)[:, None, None]

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        torch._dynamo.graph_break()
        return self.get_emb(max_seq_len, offset)


class YarnRotaryEmbedding(RotaryEmbedding):
    def get_emb(self, max_seq_len, offset=0):
        return super().get_emb(max_seq_len, offset) / 4, 1.25

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        return super().forward(max_seq_len, offset)


Attention = type("Attention", (nn.Module,), {})


def rotate(t, freqs):
    t = torch.cat((t[..., 0::2], t[..., 1::2]), -1)
    first, second = t.chunk(2, -1)
    return t * freqs.cos() + torch.cat((-second, first), -1) * freqs.sin()


class MultiLatentAttention(Attention):
    def __init__(self, config, submodules=None, layer_number=1, attn_mask_type=AttnMaskType.causal, te=False):
        super().__init__()
        c, self.layer_number, self.attn_mask_type = config, layer_number, attn_mask_type
        self.config, self.recompute_up_proj, self.checkpoint_core_attention = config, False, False
        self.softmax_scale = (c.nope + c.rope) ** -0.5
        self.shared = lambda k_rope: k_rope  # what ranks do with the key row that all heads share
        column, up = (TELinear, TELayerNormColumnParallelLinear) if te else (ColumnParallelLinear,) * 2
        self.core_attention = (TEDotProductAttention if te else Core)(c, self.softmax_scale)
        row = TELinear if te else RowParallelLinear
        self.linear_proj = row(c.heads * c.v, c.hidden_size, config=c, bias=True, skip_bias_add=True)
        norm = nn.Identity if te else lambda width: nn.RMSNorm(width, eps=c.eps)
        if c.q_lora_rank is not None:
            self.linear_q_down_proj = column(c.hidden_size, c.q_lora_rank, config=c)
            self.linear_q_up_proj = up(c.q_lora_rank, c.heads * (c.nope + c.rope), config=c)
            self.q_layernorm = norm(c.q_lora_rank)
        else:
            self.linear_q_proj = column(c.hidden_size, c.heads * (c.nope + c.rope), config=c)
        self.linear_kv_down_proj = column(c.hidden_size, c.kv_lora_rank + c.rope, config=c)
        self.linear_kv_up_proj = up(c.kv_lora_rank, c.heads * (c.nope + c.v), config=c)
        self.kv_layernorm = norm(c.kv_lora_rank)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, rotary_pos_cos=None, rotary_pos_sin=None,
                packed_seq_params=None):  # fmt: skip
        assert rotary_pos_emb is None and rotary_pos_cos is None and rotary_pos_sin is None
        c, (s, b, _) = self.config, hidden_states.shape
        if c.apply_rope_fusion:
            torch._dynamo.graph_break()
        if c.q_lora_rank is not None:
            q, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))
        else:
            q, _ = self.linear_q_proj(hidden_states)
        latent, k_rope = self.linear_kv_down_proj(hidden_states)[0].split([c.kv_lora_rank, c.rope], -1)
        kv = self.linear_kv_up_proj(self.kv_layernorm(latent))[0].view(s, b, c.heads, c.nope + c.v)
        angles = torch.outer(torch.arange(s), 10000 ** -(torch.arange(0, c.rope, 2) / c.rope))
        freqs = torch.cat((angles, angles), -1)[:, None, None]
        q_nope, q_rope = q.view(s, b, c.heads, c.nope + c.rope).split([c.nope, c.rope], -1)
        k_nope, value = kv.split([c.nope, c.v], -1)
        query = torch.cat((q_nope, rotate(q_rope, freqs)), -1)
        k_rope = rotate(self.shared(k_rope).unsqueeze(-2), freqs).expand(-1, -1, c.heads, -1)
        key = torch.cat((k_nope, k_rope), -1)
        more = {} if packed_seq_params is None else {"packed_seq_params": packed_seq_params}
        out = self.core_attention(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type, **more)
        return self.linear_proj(out)


class MLASelfAttention(MultiLatentAttention):
    def __init__(self, config, submodules=None, layer_number=1, attn_mask_type=AttnMaskType.causal, cp_comm_type=None,
                 pg_collection=None, te=False):  # fmt: skip
        super().__init__(config, submodules, layer_number, attn_mask_type, te)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear_fc1 = ColumnParallelLinear(config.hidden_size, 2 * config.ffn, config=config)
        self.linear_fc2 = RowParallelLinear(config.ffn, config.hidden_size, config=config)

    def forward(self, x):
        gate, up = self.linear_fc1(x)[0].chunk(2, -1)
        if self.config.bias_activation_fusion:
            torch._dynamo.graph_break()
        return self.linear_fc2(silu(gate) * up)


class TransformerLayer(nn.Module):
    def __init__(self, config, te=False):
        super().__init__()
        self.config, self.recompute_mlp = config, False
        self.input_layernorm, self.pre_mlp_layernorm = (nn.RMSNorm(config.hidden_size, eps=config.eps) for _ in "ab")
        self.self_attention, self.mlp = MLASelfAttention(config, te=te), MLP(config)

    def forward(self, x, attention_mask=None):
        if self.config.bias_dropout_fusion:
            torch._dynamo.graph_break()
        out, bias = self.self_attention(self.input_layernorm(x), attention_mask)
        x = x + out + bias
        return x + self.mlp(self.pre_mlp_layernorm(x))[0]


class TransformerBlock(nn.Module):
    def __init__(self, config, layers=2, te=False):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerLayer(config, te) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class LanguageModule(nn.Module):
    def compute_language_model_loss(self, labels, logits):
        torch._dynamo.graph_break()
        logits = logits.float()
        right = logits.gather(-1, labels.T.unsqueeze(-1)).squeeze(-1)
        return (logits.logsumexp(-1) - right).T.contiguous()


class GPTModel(LanguageModule):
    def __init__(self, config, layers=2, te=False, words=64):
        super().__init__()
        self.config, self.pg_collection = config, types.SimpleNamespace(tp=Group())
        self.embedding = VocabParallelEmbedding(words, config.hidden_size, scatter=True)
        self.decoder = TransformerBlock(config, layers, te)
        self.output_layer = ColumnParallelLinear(config.hidden_size, words, config=config)

    def forward(self, ids, labels=None):
        logits, _ = self.output_layer(self.decoder(self.embedding(ids)))
        return logits.transpose(0, 1) if labels is None else self.compute_language_model_loss(labels, logits)


def fired(report):
    return {name: count for name, count in report.counts.items() if count}


def off_one(model):
    """Parameters a little elsewhere, so that gains are not one."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    return model


@dataclasses.dataclass
class ModuleSpec:
    module: object
    params: dict = dataclasses.field(default_factory=dict)
    submodules: object = None


HOMES = {
    "tensor_parallel.layers": (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding),
    "extensions.transformer_engine": (
        TELinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear, TEDotProductAttention,
    ),
    "models.common.embeddings.rotary_pos_embedding": (RotaryEmbedding,),
    "models.common.embeddings.yarn_rotary_pos_embedding": (YarnRotaryEmbedding,), "transformer.attention": (Attention,),
    "transformer.multi_latent_attention": (MultiLatentAttention, MLASelfAttention), "transformer.mlp": (MLP,),
    "transformer.transformer_layer": (TransformerLayer,), "transformer.transformer_block": (TransformerBlock,),
    "transformer.spec_utils": (ModuleSpec,), "transformer.enums": (AttnMaskType,),
    "models.common.language_module.language_module": (LanguageModule,),
}


def install(monkeypatch, **more):
    """more: home -> further names and values of it."""
    for name in [n for n in sys.modules if n == "megatron" or n.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    homes = {home: {c.__name__: c for c in classes} for home, classes in HOMES.items()}
    for home, values in more.items():
        homes.setdefault(home.replace("__", "."), {}).update(values)
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    for home, values in homes.items():
        module = types.ModuleType(CORE + home)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, CORE + home, module)
