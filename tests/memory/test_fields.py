"""`Estimate.fields`: what a model keeps by what it is, beside the same count on tensors with data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megacpp_compile import estimate
from megacpp_compile.memory.fields import FIELDS, FieldWatch, by_field
from tests.remat import models
from tests.remat.test_depth_loops import Depths
from tests.remat.test_streams import LAYERS, STREAMS, Streams

DIM, HIDDEN, TOKENS = 32, 48, 40


class Experts(nn.Module):
    """Token choice; rows are gathered, computed and added up an expert. capacity: rows an expert, None for all it got."""

    def __init__(self, experts=4, k=2, capacity=None):
        super().__init__()
        self.k, self.capacity, self.router = k, capacity, nn.Linear(DIM, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, DIM, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, DIM) * 0.1)

    def forward(self, x):
        scores = self.router(x).float().softmax(-1)
        if self.capacity is None:  # rows in the order of tokens, each with its expert's weights
            gates, chosen = scores.topk(self.k, -1)
            rows = torch.arange(len(x), device=x.device).repeat_interleave(self.k)
            order = chosen.flatten().argsort()
            places, own = rows[order], gates.flatten()[order].to(x.dtype)
            each = len(order) // len(self.up)  # as if every expert got as many
            hidden = torch.cat([F.silu(part @ w) for part, w in zip(x[places].split(each), self.up, strict=True)])
            out = torch.cat([part @ w for part, w in zip(hidden.split(each), self.down, strict=True)])
            return x + torch.zeros_like(x).index_add(0, places, out * own[:, None])
        best, tokens = scores.t().topk(self.capacity, -1)  # experts choose
        rows = x[tokens.flatten()].unflatten(0, tokens.shape)
        out = torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down) * best[..., None].to(x.dtype)
        return x + torch.zeros_like(x).index_add(0, tokens.flatten(), out.flatten(0, 1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)[:, None]
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1))


class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.conv = nn.Conv1d(2 * DIM, 2 * DIM, 4, groups=2 * DIM, padding=3)

    def forward(self, x):
        h = self.conv(self.inward(x).t()[None])[..., : len(x)][0].t()
        return x + self.outward(F.silu(h).cumsum(0))


class Scan(nn.Module):
    """A state-space scan over all pairs of tokens, decayed by the running sum between them."""

    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.decay, self.into = heads, nn.Linear(DIM, heads), nn.Linear(DIM, 3 * DIM)

    def forward(self, x):
        total = F.logsigmoid(self.decay(x)).cumsum(0)
        b, c, v = self.into(x).chunk(3, -1)
        later = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)[..., None]
        decays = torch.exp((total[:, None] - total[None]).masked_fill(later, float("-inf")))
        mixed = (decays * (c @ b.t())[..., None]).permute(2, 0, 1)
        return x + torch.bmm(mixed, v.unflatten(-1, (self.heads, -1)).transpose(0, 1)).transpose(0, 1).flatten(1)


class NGrams(nn.Module):
    """Rows of a table, read by hashes of the last two ids; keys of them gate values of them, a convolution follows."""

    def __init__(self, width=24):
        super().__init__()
        self.table, self.key, self.value = nn.Embedding(97, width), nn.Linear(width, DIM), nn.Linear(width, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, groups=DIM, padding=2)
        self.register_buffer("ids", torch.arange(TOKENS) * 5 % 23)

    def forward(self, x):
        hashes = ((self.ids * 31) ^ (self.ids.roll(1) * 17)) % len(self.table.weight)
        rows = self.table(hashes)
        gate = (F.layer_norm(self.key(rows), (DIM,)) * x).sum(-1, keepdim=True)
        v = gate.sigmoid() * self.value(rows)
        return x + (v + F.silu(self.conv(v.t()[None])[0, :, : len(x)].t()))


class Positions(nn.Module):
    """As near: rows of a table, read by positions in a circle."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.out(x * self.table(torch.arange(len(x), device=x.device) % 7))


class WrittenOut(nn.Linear):
    """Attention as two GEMMs, of so few tokens that it might as well mix streams."""

    def forward(self, x):
        q, k, v = super().forward(x[:4]).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
        return (q @ k.mT).softmax(-1) @ v


class Heads(nn.Module):
    """As near to streams: what is computed is spread over a few heads with weights of each, and nothing is added."""

    def __init__(self):
        super().__init__()
        self.weights, self.block = nn.Linear(DIM, 4), nn.Linear(DIM, DIM)

    def forward(self, x):
        return (self.weights(x)[:, :, None] * self.block(x)[:, None]).square()


class Head(nn.Linear):
    def __init__(self, classes=64):
        super().__init__(DIM, classes, bias=False)

    def forward(self, x):
        logits = super().forward(x).float()
        return F.cross_entropy(logits, torch.arange(len(x), device=x.device) % logits.shape[-1])


def counted(model, x):
    """The same count on tensors with data: bytes by field of what autograd keeps."""
    kept, alive, watch = {}, [], FieldWatch()
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), x)}

    def pack(t):
        key = t.untyped_storage()._cdata
        if key not in own:
            kept.setdefault(key, (watch.of(t), t.untyped_storage().nbytes()))
        alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), watch:
        result = model(x)
    del result
    return by_field(kept.values())


MODELS = {
    "experts": lambda: nn.Sequential(nn.Linear(DIM, DIM), Experts(), Head()),
    "experts_choose": lambda: nn.Sequential(nn.Linear(DIM, DIM), Experts(capacity=8), Head()),
    "attention": lambda: nn.Sequential(Attention(), Attention(), Head()),
    "mamba": lambda: nn.Sequential(Mamba(), Head()), "scan": lambda: nn.Sequential(Scan(), Head()),
    "ngrams": lambda: nn.Sequential(nn.Linear(DIM, DIM), NGrams(), Head()),
    "positions": lambda: nn.Sequential(Positions(), Head()), "written_out": lambda: WrittenOut(DIM, 3 * DIM),
    "heads": Heads, "streams": Streams, "depths": Depths, "bf16": lambda: nn.Sequential(Attention(), Experts(), Head()).bfloat16(),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_what_is_counted(name):
    model = MODELS[name]()
    x = torch.randn(TOKENS, DIM, dtype=next(model.parameters()).dtype)
    x = models.hidden() if name in ("streams", "depths") else x
    found = estimate(model, x, compiled=False)
    assert found.fields == counted(model, x)
    assert sum(found.fields.values()) == found.eager and set(found.fields) <= set(FIELDS)
    assert found.to_dict()["fields"] == found.fields and all(f in str(found) for f in found.fields)


def fields(model, dtype=torch.float32):
    return estimate(model, torch.randn(TOKENS, DIM, dtype=dtype), compiled=False).fields


def test_a_layer_of_experts_to_the_byte():
    found = fields(nn.Sequential(nn.Linear(DIM, DIM), Experts(experts=4, k=2)), torch.float32)
    slots = TOKENS * 2
    assert found["router input"] == TOKENS * DIM * 4, "read by the router, and gathered from"
    assert found["router scores"] == TOKENS * 4 * 4, "the softmax; its operand is not kept"
    assert found["gathered rows"] == slots * DIM * 4
    assert found["expert hiddens"] == slots * (HIDDEN + HIDDEN + DIM) * 4, "before and after SiLU, and behind down"
    assert found["combine"] == slots * DIM * 4, "gated rows, whose shape index_add asks for"
    # Choices of top-k, their order, the places of rows, and gates.
    assert found["dispatch"] == slots * (8 + 8 + 8 + 4)


def test_dispatch_and_combine_grow_with_top_k_and_capacity_and_not_with_experts():
    def of(**settings):
        found = fields(nn.Sequential(nn.Linear(DIM, DIM), Experts(**settings)))
        return {f: found.get(f, 0) for f in ("dispatch", "combine", "gathered rows", "expert hiddens")}

    two, four, many = of(experts=4, k=2), of(experts=4, k=4), of(experts=8, k=2)
    assert four == {f: 2 * n for f, n in two.items()} and many == two
    few, more, wide = of(experts=4, capacity=4), of(experts=4, capacity=8), of(experts=8, capacity=4)
    assert more["gathered rows"] == 2 * few["gathered rows"] and more["dispatch"] == 2 * few["dispatch"]
    assert wide["gathered rows"] == 2 * few["gathered rows"], "here every expert has rows of its own"


def test_head_logits_attention_and_convolutions_have_their_own():
    found = fields(Head(classes=512).bfloat16(), torch.bfloat16)
    # Log-probabilities in float32; the logits themselves nobody's backward reads.
    assert found["head logits"] >= TOKENS * 512 * 4 and found["head logits"] < 1.1 * TOKENS * 512 * 4
    found = fields(Attention())
    # Queries, keys and values as one result, the core's own, which the projection behind it reads, and the core's
    # log-sum-exp.
    assert TOKENS * 4 * DIM * 4 <= found["attention"] <= TOKENS * (4 * DIM + 2 * 2) * 4 + 64
    found = fields(Mamba())
    assert found["in projections"] == TOKENS * 2 * DIM * 4, "what the convolution reads"
    # Its result with the padding's three tokens, which SiLU keeps; the running sum keeps no activation.
    assert found["convolution"] == (TOKENS + 3) * 2 * DIM * 4


def test_scans_ngrams_and_streams_to_the_byte():
    """Decays for every pair of tokens and head, and these times the scores; what comes out of it is none of it."""
    pairs = TOKENS * TOKENS * 4
    found = fields(nn.Sequential(Scan(heads=4), nn.Linear(DIM, DIM)))
    assert found["scan states"] == 2 * pairs * 4
    assert found["B and C"] == pairs, "the scores, before decays come in"
    assert found["in projections"] == TOKENS * (3 * DIM + 4) * 4, "B, C and values as one result, and the decays'"
    assert not {"scan states", "B and C", "in projections"} & set(fields(Attention()))
    # Five times the width of the model a token, beside the rows themselves.
    found = fields(nn.Sequential(nn.Linear(DIM, DIM), NGrams(width=24), nn.Linear(DIM, DIM)))
    wide = 5 * TOKENS + 2  # key, normed key, value, gated value, and the convolution's result with two tokens of padding
    # Hashes, and mean, deviation and gate a token.
    assert found["n-gram memory"] == wide * DIM * 4 + TOKENS * (24 * 4 + 8 + 3 * 4)
    x = models.hidden()
    found = estimate(Streams(), x, compiled=False).fields
    assert found["residual streams"] == LAYERS * STREAMS * x.numel() * 4, "not those of the last layer: a sum reads them"
    # In each layer the normed copy and what the block reads; a token coefficients, their sigmoid and their softmax, and
    # the norm's factor, but for the first layer, as the input needs no gradient.
    tokens = x.numel() // models.DIM
    each = (STREAMS + 1) * models.DIM + STREAMS * (STREAMS + 2) + STREAMS + STREAMS**2 + 1
    assert found["stream mixing"] == (LAYERS * each - 1) * tokens * 4


def test_a_loop_over_depth_is_so_many_blocks(monkeypatch):
    def of(depths):
        monkeypatch.setattr("tests.remat.test_depth_loops.DEPTHS", depths)
        return estimate(Depths(), models.hidden(), compiled=False).fields

    one, two, three = map(of, (1, 2, 3))
    assert "depth loop" not in one, "a layer like any other"
    assert three["depth loop"] * 2 == two["depth loop"] * 3
    assert two["attention"] == three["attention"], "the trunk's"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted({*MODELS} - {"streams", "depths", "ngrams"}))
def test_what_is_near_has_no_such_field(name):
    model = MODELS[name]()
    found = fields(model, next(model.parameters()).dtype)
    assert not {"residual streams", "stream mixing", "depth loop", "n-gram memory"} & set(found)
    assert ("attention" in found) == (name in ("attention", "bf16", "written_out"))


def test_a_dense_block_is_near_what_megatron_counts():
    """34 bytes a token and channel in half precision without the scores of attention: arXiv:2205.05198, table 2. On
    CPU a mask of dropout takes two bytes where theirs takes one."""
    wide = 256

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
            self.qkv, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
            self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(1, 2, 0, 3)[:, None]
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
            x = x + F.dropout(self.out(o), 0.1)
            return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)

    model = nn.Sequential(nn.Linear(wide, wide), Block()).bfloat16()
    found = estimate(model, torch.randn(512, wide, dtype=torch.bfloat16), compiled=False)
    assert found.eager / (512 * wide) == pytest.approx(34 + 2, rel=0.05)


LM = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4, "intermediate_size": 96}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
REAL = {
    "DeepseekV3": {**LM, **MLA, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
                   "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "Mixtral": {**LM, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mamba2": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_heads": 8, "head_dim": 16,
               "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "DeepseekV4": {**LM, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16,
                   "index_n_heads": 2, "index_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
                   "num_experts_per_tok": 2, "hc_mult": 4},
    "Qwen4Exp": {**LM, **DELTA, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
                 "num_experts_per_tok": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32,
                 "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8,
                 "layer_types": ["linear_attention"] * 2, "eos_token_id": 0},
}  # fmt: skip


EXPERTS = {"dispatch", "gathered rows", "expert hiddens"}
ROUTER = {"router input", "router scores"}
STREAM = {"residual streams", "stream mixing"}
OWN = {
    "DeepseekV3": {*EXPERTS, *ROUTER, "attention"}, "Mixtral": {*EXPERTS, *ROUTER},
    "Mamba2": {"in projections", "convolution", "B and C", "scan states"},
    "DeepseekV4": {*EXPERTS, *STREAM, "attention"},  # its first layers choose experts by a table
    "Qwen4Exp": {*EXPERTS, *ROUTER, *STREAM, "convolution", "B and C", "scan states", "n-gram memory"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REAL)
def test_models_nobody_here_wrote(name):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"no {name} in transformers {transformers.__version__}")
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    built = getattr(transformers, f"{name}ForCausalLM")(config(**REAL[name]))

    class Step(nn.Sequential):
        def forward(self, ids):
            return self[0](input_ids=ids, labels=ids, use_cache=False).loss

    model, ids = Step(built), torch.randint(128, (2, 24))
    found, real = dict(estimate(model, ids, compiled=False).fields), counted(model, ids)
    if name == "Mixtral":  # transformers makes a mask where a model is traced, and calls another kernel with it
        assert found.pop("attention") > real.pop("attention") > 0
    assert found == real and OWN[name] | {"head logits", "elementwise"} <= set(found)
    wide = ids.numel() * 4 * LM["hidden_size"] * 4
    # Before, between and behind two blocks a layer: what the last one writes a norm reads.
    assert found.get("residual streams", 0) == (5 * wide if "residual streams" in OWN[name] else 0)
