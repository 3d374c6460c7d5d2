"""Whole attention blocks and small models, each written in the manner of a well-known code base.

`GALLERY` maps a name to an Entry; build() gives (module, args) and is the same at every call. An expectation of 0 is
"must not fire", "1?" is "may fire": legal there, but an op need not cover it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import jitter_gains
from .spellings import NORMS, ROPES, ConcatSpelling, PlainMLA, angles, rotate_half, sdpa, tables

BATCH, SEQ, DIM = 2, 6, 40
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, V = 3, 20, 26, 16, 8, 12
MLA = {"down_norm_up": 2, "mla_rope_q": 1, "mla_rope_kv": 1}
NOTHING_OF_MLA = {"down_norm_up": 0, "mla_rope_q": 0, "mla_rope_kv": 0}


@dataclass(frozen=True)
class Entry:
    """build() -> (module, args); `expected` as described in the package's docstring."""

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    expected: dict[str, int | str]


GALLERY: dict[str, Entry] = {}


def gallery(name: str, expected: dict[str, int | str]):
    """Decorator for a function that returns (module, args), or a module alone, whose argument is `hidden_states()`."""

    def register(make):
        def build():
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                made = make()
                module, args = made if isinstance(made, tuple) else (made, (hidden_states(),))
            return jitter_gains(module), args

        GALLERY[name] = Entry(name, build, dict(expected))
        return make

    return register


def hidden_states(*shape: int) -> Tensor:
    """The input of a block."""
    return torch.randn(*(shape or (BATCH, SEQ, DIM))).requires_grad_()


def linear(fan_in: int, fan_out: int, bias: bool = False) -> nn.Linear:
    """A projection; without bias unless asked."""
    return nn.Linear(fan_in, fan_out, bias=bias)


# --- the DeepSeek reference code, and code that follows it


class ReferenceMLA(nn.Module):
    """(B, S, H, D) throughout, complex RoPE, einsum attention; absorbed: scores against the latent itself."""

    def __init__(self, absorbed: bool):
        super().__init__()
        self.absorbed = absorbed
        self.wq_a, self.q_norm = linear(DIM, Q_RANK), NORMS["functional_rms_norm"](Q_RANK)
        self.wq_b = linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.wkv_a, self.kv_norm = linear(DIM, KV_RANK + ROPE), NORMS["functional_rms_norm"](KV_RANK)
        self.wkv_b = linear(KV_RANK, HEADS * (NOPE + V))
        self.wo = linear(HEADS * V, DIM)
        self.softmax_scale = (NOPE + ROPE) ** -0.5

    def rotary(self, x, freqs_cis):
        dtype = x.dtype
        x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        freqs_cis = freqs_cis.view(1, x.size(1), 1, x.size(-1))
        return torch.view_as_real(x * freqs_cis).flatten(3).to(dtype)

    def forward(self, x, freqs_cis, mask):
        bsz, seqlen, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(bsz, seqlen, HEADS, NOPE + ROPE)
        q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
        q_pe = self.rotary(q_pe, freqs_cis)
        kv, k_pe = torch.split(self.wkv_a(x), [KV_RANK, ROPE], dim=-1)
        k_pe = self.rotary(k_pe.unsqueeze(2), freqs_cis)
        if not self.absorbed:
            q = torch.cat([q_nope, q_pe], dim=-1)
            kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, HEADS, NOPE + V)
            k_nope, v = torch.split(kv, [NOPE, V], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, HEADS, -1)], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        else:
            wkv_b = self.wkv_b.weight.view(HEADS, -1, KV_RANK)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, :NOPE])
            latent = self.kv_norm(kv)
            scores = torch.einsum("bshc,btc->bsht", q_nope, latent)
            scores = (scores + torch.einsum("bshr,btr->bsht", q_pe, k_pe.squeeze(2))) * self.softmax_scale
        scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        if not self.absorbed:
            x = torch.einsum("bsht,bthd->bshd", scores, v)
        else:
            x = torch.einsum("bsht,btc->bshc", scores, latent)
            x = torch.einsum("bshc,hdc->bshd", x, wkv_b[:, -V:])
        return self.wo(x.flatten(2))


def _reference_arguments():
    mask = torch.full((SEQ, SEQ), float("-inf")).triu_(1)
    return hidden_states(), *tables("complex", SEQ, ROPE), mask


gallery("deepseek_v3_reference_naive", MLA)(lambda: (ReferenceMLA(absorbed=False), _reference_arguments()))
gallery("deepseek_v3_reference_absorbed", {"down_norm_up": 1, "mla_rope_q": 0, "mla_rope_kv": 0})(
    lambda: (ReferenceMLA(absorbed=True), _reference_arguments()))  # fmt: skip


class RemoteCodeMLA(nn.Module):
    """DeepSeek-V2's remote code: cached tables gathered by position, de-interleaving copy, both sides in new_empty."""

    def __init__(self, bias=False, latent_scale=None, cache=None):
        super().__init__()
        self.latent_scale = latent_scale
        self.q_a_proj, self.q_a_layernorm = linear(DIM, Q_RANK, bias), NORMS["cast_before_gain"](Q_RANK)
        self.q_b_proj = linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = linear(DIM, KV_RANK + ROPE, bias)
        self.kv_a_layernorm = NORMS["cast_before_gain"](KV_RANK)
        self.kv_b_proj = linear(KV_RANK, HEADS * (NOPE + V))
        self.o_proj = linear(HEADS * V, DIM, bias)
        cos, sin = tables("full", 16, ROPE)
        self.register_buffer("cos_cached", cos, persistent=False)
        self.register_buffer("sin_cached", sin, persistent=False)
        self.cache = cache
        if cache == "latent":
            self.register_buffer("cached", torch.zeros(BATCH, 16, KV_RANK), persistent=False)
        elif cache == "keys":
            self.register_buffer("cached", torch.zeros(BATCH, HEADS, 16, NOPE + ROPE), persistent=False)

    def apply_rotary_pos_emb(self, q, k, cos, sin, position_ids, unsqueeze_dim=1):
        cos, sin = cos[position_ids].unsqueeze(unsqueeze_dim), sin[position_ids].unsqueeze(unsqueeze_dim)
        b, h, s, d = q.shape
        q = q.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
        b, h, s, d = k.shape
        k = k.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
        return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)

    def forward(self, hidden_states, position_ids):
        bsz, q_len, _ = hidden_states.size()
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
        compressed_kv, k_pe = torch.split(self.kv_a_proj_with_mqa(hidden_states), [KV_RANK, ROPE], dim=-1)
        latent = self.kv_a_layernorm(compressed_kv)
        if self.latent_scale is not None:
            q_latent, latent = q_latent * self.latent_scale, latent * self.latent_scale
        if self.cache == "latent":
            self.cached[:, :q_len] = latent.detach()
        q = self.q_b_proj(q_latent).view(bsz, q_len, HEADS, NOPE + ROPE).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
        k_pe = k_pe.view(bsz, q_len, 1, ROPE).transpose(1, 2)
        kv = self.kv_b_proj(latent).view(bsz, q_len, HEADS, NOPE + V).transpose(1, 2)
        k_nope, value_states = torch.split(kv, [NOPE, V], dim=-1)
        cos, sin = self.cos_cached[:q_len], self.sin_cached[:q_len]
        q_pe, k_pe = self.apply_rotary_pos_emb(q_pe, k_pe, cos, sin, position_ids)
        query_states = k_pe.new_empty(bsz, HEADS, q_len, NOPE + ROPE)
        query_states[:, :, :, :NOPE] = q_nope
        query_states[:, :, :, NOPE:] = q_pe
        key_states = k_pe.new_empty(bsz, HEADS, q_len, NOPE + ROPE)
        key_states[:, :, :, :NOPE] = k_nope
        key_states[:, :, :, NOPE:] = k_pe
        if self.cache == "keys":
            self.cached[:, :, :q_len] = key_states.detach()
        weights = torch.matmul(query_states, key_states.transpose(2, 3)) * (NOPE + ROPE) ** -0.5
        weights = weights + torch.full((q_len, q_len), torch.finfo(weights.dtype).min).triu(1)
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        out = torch.matmul(weights, value_states).transpose(1, 2).contiguous()
        return self.o_proj(out.reshape(bsz, q_len, HEADS * V))


def _remote_code_arguments():
    return hidden_states(), torch.arange(SEQ)[None]


gallery("deepseek_v2_remote_code", MLA)(lambda: (RemoteCodeMLA(), _remote_code_arguments()))
gallery("biases_in_projections", {**MLA, "down_norm_up": "2?"})(
    lambda: (RemoteCodeMLA(bias=True), _remote_code_arguments()))  # fmt: skip
gallery("latent_scaled_by_a_constant", {**MLA, "down_norm_up": "2?"})(
    lambda: (RemoteCodeMLA(latent_scale=0.7), _remote_code_arguments()))  # fmt: skip
gallery("latent_written_to_cache", MLA)(lambda: (RemoteCodeMLA(cache="latent"), _remote_code_arguments()))
gallery("keys_written_to_cache", MLA)(lambda: (RemoteCodeMLA(cache="keys"), _remote_code_arguments()))


# --- Megatron and NeMo: (S, B, H, D)


class SequenceFirstMLA(nn.Module):
    """Sequence first, angles of (S, 1, 1, D) as an argument, chunked half turn, a tail without lanes behind it."""

    def __init__(self):
        super().__init__()
        self.linear_q_down_proj, self.q_layernorm = linear(DIM, Q_RANK), nn.RMSNorm(Q_RANK, eps=1e-5)
        self.linear_q_up_proj = linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.linear_kv_down_proj, self.kv_layernorm = linear(DIM, KV_RANK + ROPE), nn.RMSNorm(KV_RANK, eps=1e-5)
        self.linear_kv_up_proj = linear(KV_RANK, HEADS * (NOPE + V))
        self.linear_proj = linear(HEADS * V, DIM)

    def rotary(self, t, freqs):
        rot_dim = freqs.shape[-1]
        t, t_pass = t[..., :rot_dim], t[..., rot_dim:]
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
        cos_, sin_ = torch.cos(freqs).to(t.dtype), torch.sin(freqs).to(t.dtype)
        x1, x2 = torch.chunk(t, 2, dim=-1)
        t = (t * cos_) + (torch.cat((-x2, x1), dim=-1) * sin_)
        return torch.cat((t, t_pass), dim=-1)

    def forward(self, hidden, freqs):
        s, b, _ = hidden.size()
        q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden))).view(s, b, HEADS, NOPE + ROPE)
        kv_combined = self.linear_kv_down_proj(hidden)
        kv_compressed, k_pos_emb = torch.split(kv_combined, [KV_RANK, ROPE], dim=-1)
        kv = self.linear_kv_up_proj(self.kv_layernorm(kv_compressed)).view(s, b, HEADS, NOPE + V)
        q_no_pe, q_pos_emb = torch.split(q, [NOPE, ROPE], dim=-1)
        k_no_pe, value = torch.split(kv, [NOPE, V], dim=-1)
        q_pos_emb = self.rotary(q_pos_emb, freqs)
        k_pos_emb = self.rotary(torch.unsqueeze(k_pos_emb, 2), freqs)
        query = torch.cat([q_no_pe, q_pos_emb], dim=-1)
        key = torch.cat([k_no_pe, k_pos_emb.expand(-1, -1, HEADS, -1)], dim=-1)
        query, key, value = (t.contiguous().permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear_proj(out.permute(2, 0, 1, 3).reshape(s, b, -1))


@gallery("megatron_sequence_first", MLA)
def megatron_sequence_first():
    theta = angles(SEQ, ROPE)
    return SequenceFirstMLA(), (hidden_states(SEQ, BATCH, DIM), torch.cat((theta, theta), dim=-1)[:, None, None])


# --- torchtitan, and variants of one block


class TitanMLA(nn.Module):
    """(B, S, H, D), complex table as a buffer, nn.RMSNorm; `query` and `finish` are what the variants replace."""

    def __init__(self, query_rank=None):
        super().__init__()
        self.query_rank = query_rank
        if query_rank:
            self.wq_a, self.q_norm = linear(DIM, query_rank), nn.RMSNorm(query_rank, eps=1e-5)
        self.wq_b = linear(query_rank or DIM, HEADS * (NOPE + ROPE))
        self.wkv_a, self.kv_norm = linear(DIM, KV_RANK + ROPE), nn.RMSNorm(KV_RANK, eps=1e-5)
        self.wkv_b = linear(KV_RANK, HEADS * (NOPE + V))
        self.wo = linear(HEADS * V, DIM)
        self.register_buffer("freqs_cis", tables("complex", 16, ROPE)[0], persistent=False)

    def rotate(self, x):
        z = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        freqs_cis = self.freqs_cis[0 : x.size(1)].view(1, x.size(1), 1, -1)
        return torch.view_as_real(z * freqs_cis).flatten(3).to(x.dtype)

    def query(self, x):
        q = self.wq_b(self.q_norm(self.wq_a(x)) if self.query_rank else x)
        q_nope, q_pe = torch.split(q.view(x.size(0), x.size(1), -1, NOPE + ROPE), [NOPE, ROPE], dim=-1)
        return torch.cat([q_nope, self.rotate(q_pe)], dim=-1)

    def finish(self, out, q):
        return self.wo(out)

    def forward(self, x):
        bsz, seqlen, _ = x.size()
        q = self.query(x)
        kv, k_pe = torch.split(self.wkv_a(x), [KV_RANK, ROPE], dim=-1)
        k_pe = self.rotate(k_pe.unsqueeze(2))
        kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, -1, NOPE + V)
        k_nope, v = torch.split(kv, [NOPE, V], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, HEADS, -1)], dim=-1)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.finish(out.transpose(1, 2).contiguous().view(bsz, seqlen, -1), q)


gallery("torchtitan", MLA)(lambda: TitanMLA(Q_RANK))
gallery("query_without_low_rank", {**MLA, "down_norm_up": 1})(TitanMLA)


class OneDownProjection(TitanMLA):
    """Queries, keys and values, and the rope key leave one linear."""

    def __init__(self, bias=False, in_two_steps=False):
        super().__init__(Q_RANK)
        self.latents, self.in_two_steps = linear(DIM, Q_RANK + KV_RANK + ROPE, bias), in_two_steps
        del self.wq_a, self.wkv_a

    def forward(self, x):
        down = self.latents(x)
        if self.in_two_steps:
            c_q, c_kv = down[..., :Q_RANK], down[..., Q_RANK:]
            c_kv, k_pe = c_kv[..., :KV_RANK], c_kv[..., KV_RANK:]
        else:
            c_q, c_kv, k_pe = torch.split(down, [Q_RANK, KV_RANK, ROPE], dim=-1)
        q = self.wq_b(self.q_norm(c_q)).unflatten(-1, (HEADS, NOPE + ROPE))
        q = torch.cat([q[..., :NOPE], self.rotate(q[..., NOPE:].contiguous())], dim=-1)
        k, v = self.wkv_b(self.kv_norm(c_kv)).unflatten(-1, (HEADS, NOPE + V)).split([NOPE, V], dim=-1)
        k_pe = self.rotate(k_pe.unsqueeze(2).contiguous()).repeat(1, 1, HEADS, 1)
        q, k, v = (t.transpose(1, 2) for t in (q, torch.cat([k, k_pe], dim=-1), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


gallery("one_down_projection", MLA)(OneDownProjection)
gallery("one_down_projection_with_bias_cut_twice", MLA)(lambda: OneDownProjection(bias=True, in_two_steps=True))


@gallery("separate_query_linears", {"down_norm_up": 1, "mla_rope_q": "1?", "mla_rope_kv": 1})
class SeparateQueryLinears(TitanMLA):
    """A projection for the nope lanes and another for the rope lanes: there is no one query buffer."""

    def __init__(self):
        super().__init__()
        self.wq_b = linear(DIM, HEADS * NOPE)
        self.wq_pe = linear(DIM, HEADS * ROPE)

    def query(self, x):
        q_nope, q_pe = (p(x).unflatten(-1, (HEADS, -1)) for p in (self.wq_b, self.wq_pe))
        return torch.cat([q_nope, self.rotate(q_pe)], dim=-1)


@gallery("query_rotated_in_place", {"down_norm_up": 1, "mla_rope_q": "1?", "mla_rope_kv": 1})
class QueryRotatedInPlace(TitanMLA):
    """The rotated slice is written back over the query."""

    def query(self, x):
        q = self.wq_b(x).view(x.size(0), x.size(1), HEADS, NOPE + ROPE)
        q[..., NOPE:] = self.rotate(q[..., NOPE:])
        return q


@gallery("query_used_again", {"mla_rope_q": "2?", "mla_rope_kv": 0, "down_norm_up": 0})
class QueryUsedAgain(TitanMLA):
    """The query before rotation gates the output: an op that rotates in place must not spoil it."""

    def query(self, x):
        q = self.wq_b(x).view(x.size(0), x.size(1), HEADS, NOPE + ROPE)
        q_nope, q_pe = q.split([NOPE, ROPE], dim=-1)
        self_gate = torch.sigmoid(q.mean(-1, keepdim=True) + q_pe[..., :1])
        return torch.cat([q_nope, self.rotate(q_pe)], dim=-1), self_gate

    def forward(self, x):
        q, gate = self.query(x)
        other = TitanMLA.query(self, x)
        return (q * gate + other).flatten(2)


@gallery("rotated_slice_used_again", {**MLA, "down_norm_up": 1})
class RotatedSliceUsedAgain(TitanMLA):
    """The rotated lanes are read once more, out of the finished query."""

    def finish(self, out, q):
        return self.wo(out) + q[..., NOPE:].sum((-1, -2))[..., None]


class Autocast(nn.Module):
    """A block whose forward turns autocast on."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.block(*args).float()


gallery("autocast_inside", MLA)(lambda: Autocast(TitanMLA(Q_RANK)))


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing: their bodies are subgraphs of a higher-order op."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


gallery("checkpointed_blocks", {"down_norm_up": "4?", "mla_rope_q": "2?", "mla_rope_kv": "2?"})(
    lambda: Checkpointed([TitanMLA(Q_RANK) for _ in range(2)]))  # fmt: skip


class SharedBlock(nn.Module):
    """One block, run twice on its own output."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, *tables):
        x = x + self.block(x, *tables)
        return x + self.block(x, *tables)


gallery("one_block_twice", {name: 2 * count for name, count in MLA.items()})(
    lambda: SharedBlock(PlainMLA(table_source="buffer", concat="assign_into_empty")))  # fmt: skip


@gallery("turned_backwards", {**MLA, "mla_rope_q": "1?", "mla_rope_kv": "1?"})
def turned_backwards():
    def backwards(x, tables, heads_dim=1):
        # still a rotation, by the opposite angle: right if the op is given -sin
        cos, sin = (t.unsqueeze(heads_dim - 1) for t in tables)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)

    block = PlainMLA(rope_spelling="halves_products_in_cat")
    block.rope = block.rope._replace(rotate=backwards)
    return block, (hidden_states(), *tables("half", SEQ, ROPE))


@gallery("halves_with_their_own_frequencies", {**MLA, "mla_rope_q": "1?", "mla_rope_kv": "1?"})
def halves_with_their_own_frequencies():
    # full-width tables whose halves differ: an op that reads only one half of them gives another result
    theta = angles(SEQ, 2 * ROPE)
    return PlainMLA(rope_spelling="rotate_half_by_slices"), (hidden_states(), theta.cos(), theta.sin())


# Two that an op could have been too narrow for: the contracts have `rope_first` and `out_dtype` because real models are
# written this way.


@gallery("rope_slice_first_in_the_concat", MLA)
def rope_slice_first_in_the_concat():
    def rope_first(nope, pe, heads_dim=1):
        return torch.cat((pe.expand(*nope.shape[:-1], -1), nope), dim=-1)

    block = PlainMLA()
    block.concat = ConcatSpelling(rope_first, rope_first)
    return block, (hidden_states(), *tables("full", SEQ, ROPE))


@gallery("concat_promoted_to_float32", MLA)
def concat_promoted_to_float32():
    # float32 tables promote bfloat16 operands: queries and keys are float32 from the concat on
    block = PlainMLA(rope_spelling="halves_products_in_cat").bfloat16()
    block.attend = lambda q, k, v: sdpa(q, k, v.float()).to(v.dtype)
    return block, (torch.randn(BATCH, SEQ, DIM).bfloat16().requires_grad_(), *tables("half", SEQ, ROPE))


# --- ordinary attention


class MiniGQA(nn.Module):
    """minimind's manner: rotate_half inside the function, q and k together, keys repeated by expand and reshape."""

    heads, kv_heads, width = 6, 2, 14

    def __init__(self):
        super().__init__()
        self.q_proj = linear(DIM, self.heads * self.width)
        self.k_proj, self.v_proj = (linear(DIM, self.kv_heads * self.width) for _ in range(2))
        self.o_proj = linear(self.heads * self.width, DIM)
        self.dropout = nn.Dropout(0.0)

    def apply_rotary_pos_emb(self, q, k, cos, sin, unsqueeze_dim=1):
        def turned(x):
            return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return (q * cos) + (turned(q) * sin), (k * cos) + (turned(k) * sin)

    def repeat_kv(self, x):
        b, s, h, d = x.shape
        n = self.heads // self.kv_heads
        return x[:, :, :, None, :].expand(b, s, h, n, d).reshape(b, s, h * n, d)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        xq = self.q_proj(x).view(b, s, self.heads, self.width)
        xk = self.k_proj(x).view(b, s, self.kv_heads, self.width)
        xv = self.v_proj(x).view(b, s, self.kv_heads, self.width)
        xq, xk = self.apply_rotary_pos_emb(xq, xk, cos[:s], sin[:s])
        xq, xk, xv = xq.transpose(1, 2), self.repeat_kv(xk).transpose(1, 2), self.repeat_kv(xv).transpose(1, 2)
        scores = (xq @ xk.transpose(-2, -1)) / self.width**0.5
        scores = scores + torch.triu(torch.full((s, s), float("-inf")), diagonal=1)[None, None]
        out = self.dropout(F.softmax(scores.float(), dim=-1).type_as(xq)) @ xv
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


gallery("minimind_gqa", {**NOTHING_OF_MLA, "rope_qk": 1})(
    lambda: (MiniGQA(), (hidden_states(), *tables("full", 16, MiniGQA.width))))  # fmt: skip


class FastGQA(nn.Module):
    """gpt-fast's manner: fused projection, one cache of (cos, sin) pairs, heads transposed after RoPE."""

    heads, kv_heads, width = 6, 2, 14

    def __init__(self):
        super().__init__()
        self.wqkv = linear(DIM, (self.heads + 2 * self.kv_heads) * self.width)
        self.wo = linear(self.heads * self.width, DIM)

    def forward(self, x, freqs_cis):
        bsz, seqlen, _ = x.shape
        kv_size = self.kv_heads * self.width
        q, k, v = self.wqkv(x).split([self.heads * self.width, kv_size, kv_size], dim=-1)
        q = q.view(bsz, seqlen, self.heads, self.width)
        k, v = (t.view(bsz, seqlen, self.kv_heads, self.width) for t in (k, v))
        q, k = (ROPES["indexed_pairs_with_stacked_cache"].rotate(t, (freqs_cis,), 2) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


gallery("gpt_fast_gqa", {**NOTHING_OF_MLA, "rope_qk": 1})(
    lambda: (FastGQA(), (hidden_states(), *tables("stacked", SEQ, FastGQA.width))))  # fmt: skip


# optional: every rotation makes tables of its own, equal only after common subexpressions are merged
@gallery("lucidrains_attention", {**NOTHING_OF_MLA, "rope_qk": "1?"})
class LucidAttention(nn.Module):
    """lucidrains' manner: pre-norm by F.normalize, one projection to q, k, v, angles turned to tables at every use."""

    heads, width = 4, 14

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(DIM))
        self.to_qkv = linear(DIM, 3 * self.heads * self.width)
        self.to_out = linear(self.heads * self.width, DIM)
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, self.width, 2).float() / self.width))

    def rotate(self, t, freqs):
        a, b = t.unflatten(-1, (-1, 2)).unbind(dim=-1)
        turned = torch.stack((-b, a), dim=-1).flatten(-2)
        return t * freqs.cos() + turned * freqs.sin()

    def forward(self, x):
        x = F.normalize(x, dim=-1) * DIM**0.5 * self.gamma
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        freqs = torch.einsum("i,j->ij", torch.arange(x.shape[1]).type_as(self.inv_freq), self.inv_freq)
        freqs = freqs.repeat_interleave(2, dim=-1)
        q, k = self.rotate(q * self.width**-0.5, freqs), self.rotate(k, freqs)
        sim = torch.einsum("bhid,bhjd->bhij", q, k)
        sim = sim.masked_fill(torch.ones(sim.shape[-2:], dtype=torch.bool).triu(1), -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class LabelledRotary(nn.Module):
    """labml's manner: (S, B, H, D), rotary module with a cache of (S, 1, 1, D), negative half by cat."""

    heads, width = 4, 14

    def __init__(self, rotary_lanes):
        super().__init__()
        self.lanes = rotary_lanes
        self.query, self.key, self.value = (linear(DIM, self.heads * self.width) for _ in range(3))
        self.output = linear(self.heads * self.width, DIM)

    def rotary(self, x, cos, sin):
        x_rope, x_pass = x[..., : self.lanes], x[..., self.lanes :]
        half = self.lanes // 2
        neg_half_x = torch.cat([-x_rope[:, :, :, half:], x_rope[:, :, :, :half]], dim=-1)
        return torch.cat(((x_rope * cos[: x.shape[0]]) + (neg_half_x * sin[: x.shape[0]]), x_pass), dim=-1)

    def forward(self, x, cos, sin):
        q, k, v = (p(x).view(*x.shape[:2], self.heads, self.width) for p in (self.query, self.key, self.value))
        q, k = self.rotary(q, cos, sin), self.rotary(k, cos, sin)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.width**-0.5
        mask = torch.tril(torch.ones(x.shape[0], x.shape[0]))[:, :, None, None]
        attn = scores.masked_fill(mask == 0, float("-inf")).softmax(dim=1)
        return self.output(torch.einsum("ijbh,jbhd->ibhd", attn, v).flatten(2))


@gallery("labml_whole_heads", {**NOTHING_OF_MLA, "rope_qk": "1?"})
def labml_whole_heads():
    cos, sin = (t[:, None, None] for t in tables("full", 16, 14))
    return LabelledRotary(14), (hidden_states(SEQ, BATCH, DIM), cos, sin)


# rope_qk passes the lanes behind the rotated ones through, so partial rotary is not left alone.
@gallery("labml_partial_heads", {**NOTHING_OF_MLA, "rope_qk": 1})
def labml_partial_heads():
    cos, sin = (t[:, None, None] for t in tables("full", 16, 6))
    return LabelledRotary(6), (hidden_states(SEQ, BATCH, DIM), cos, sin)


@gallery("textbook_latent_attention", {**NOTHING_OF_MLA, "rope_qk": 0})
class TextbookLatentAttention(nn.Module):
    """Textbook MLA: a latent and two up projections, but no norm and no positions."""

    def __init__(self):
        super().__init__()
        self.W_query = linear(DIM, HEADS * V)
        self.W_DKV = linear(DIM, KV_RANK)
        self.W_UK, self.W_UV = (linear(KV_RANK, HEADS * V) for _ in range(2))
        self.out_proj = nn.Linear(HEADS * V, DIM)

    def forward(self, x):
        b, num_tokens, _ = x.shape
        latent = self.W_DKV(x)
        q, k, v = (
            t.view(b, num_tokens, HEADS, V).transpose(1, 2)
            for t in (self.W_query(x), self.W_UK(latent), self.W_UV(latent))
        )
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(torch.ones(num_tokens, num_tokens).triu(1).bool(), -torch.inf)
        context = (torch.softmax(scores / V**0.5, dim=-1) @ v).transpose(1, 2)
        return self.out_proj(context.contiguous().view(b, num_tokens, -1))


# --- a language model


class TiedLM(nn.Module):
    """Two pre-norm layers of MLA and SwiGLU; the embedding is the output projection too."""

    def __init__(self, vocabulary=50, layers=2, hidden=44):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, DIM)
        self.attention = nn.ModuleList(TitanMLA(Q_RANK) for _ in range(layers))
        self.norms = nn.ModuleList(NORMS["type_as_then_gain"](DIM) for _ in range(2 * layers + 1))
        self.gate = nn.ModuleList(linear(DIM, hidden) for _ in range(layers))
        self.lift = nn.ModuleList(linear(DIM, hidden) for _ in range(layers))
        self.lower = nn.ModuleList(linear(hidden, DIM) for _ in range(layers))
        self.head = linear(DIM, vocabulary)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x))
            h = self.norms[2 * i + 1](x)
            x = x + self.lower[i](F.silu(self.gate[i](h)) * self.lift[i](h))
        logits = self.head(self.norms[-1](x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@gallery("tied_language_model", {"down_norm_up": 4, "mla_rope_q": 2, "mla_rope_kv": 2, "linear_cross_entropy": 1})
def tied_language_model():
    tokens = torch.randint(0, 50, (BATCH, SEQ + 1))
    return TiedLM(), (tokens[:, :-1], tokens[:, 1:].contiguous())
