"""The same few ideas, as different model authors spell them, and two attention blocks built from any combination.

`ROPES`, `NORMS`, `CONCATS`, `SPLITS` map a name to a spelling; `PlainMLA` and `PlainGQA` take those names.
All sizes of the default blocks differ from each other, so that a wrong dimension cannot pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import jitter_gains

# --- RoPE tables


def angles(seq: int, dim: int, dtype=torch.float32, device=None, base: float = 100.0) -> Tensor:
    """Angle of every position and lane pair, (seq, dim / 2). A small base keeps every pair visibly turning."""
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, device=device, dtype=dtype) / dim))
    return torch.outer(torch.arange(seq, device=device, dtype=dtype), inv_freq)


def tables(kind: str, seq: int, dim: int, dtype=torch.float32, device=None) -> tuple[Tensor, ...]:
    """RoPE tables for `dim` lanes, as model authors prepare them; all without batch or heads dimensions.

    full      cos, sin of cat(angles, angles)                 (seq, dim)
    half      cos, sin                                        (seq, dim / 2)
    repeated  cos, sin with every lane twice in a row         (seq, dim)
    complex   one table of unit complex numbers               (seq, dim / 2)
    stacked   cos and sin in one tensor                       (seq, dim / 2, 2)
    gathered  full tables longer than the text, position ids  (seq + 3, dim), (1, seq)
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    theta = angles(seq + 3 if kind == "gathered" else seq, dim, wide, device)
    if kind == "complex":
        return (torch.polar(torch.ones_like(theta), theta),)
    if kind == "stacked":
        return (torch.stack([theta.cos(), theta.sin()], dim=-1).to(dtype),)
    if kind in ("full", "gathered"):
        theta = torch.cat((theta, theta), dim=-1)
    elif kind == "repeated":
        theta = theta.repeat_interleave(2, dim=-1)
    elif kind != "half":
        raise ValueError(f"unknown table kind {kind!r}")
    positions = (torch.arange(seq, device=device)[None],) if kind == "gathered" else ()
    return (theta.cos().to(dtype), theta.sin().to(dtype), *positions)


# --- RoPE


class RopeSpelling(NamedTuple):
    """`rotate(x, tables, heads_dim)` for x of (B, H, S, D) with heads_dim 1 or (B, S, H, D) with heads_dim 2.

    `pairs`: which lanes turn together, "halves" (i, i + D/2) or "neighbours" (2i, 2i + 1). `output`: the lane order
    that is left behind. `restores_dtype`: takes float32 tables, computes in float32, returns the dtype of x.
    """

    rotate: Callable[..., Tensor]
    table: str
    pairs: str
    output: str
    restores_dtype: bool


ROPES: dict[str, RopeSpelling] = {}


def _rope(table: str, pairs: str, output: str | None = None, restores_dtype: bool = False):
    def register(rotate):
        ROPES[rotate.__name__] = RopeSpelling(rotate, table, pairs, output or pairs, restores_dtype)
        return rotate

    return register


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) on the halves of the last dimension."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


@_rope("full", "halves")
def rotate_half_by_slices(x, tables, heads_dim=1):
    cos, sin = (t.unsqueeze(0).unsqueeze(heads_dim) for t in tables)
    return (x * cos) + (rotate_half(x) * sin)


@_rope("full", "halves")
def rotate_half_by_chunk(x, tables, heads_dim=1):
    cos, sin = (t.unsqueeze(heads_dim - 1) for t in tables)
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


@_rope("full", "halves")
def rotate_half_by_split(x, tables, heads_dim=1):
    cos, sin = (t[None, :, None] if heads_dim == 2 else t[None, None] for t in tables)
    x1, x2 = torch.split(x, x.size(-1) // 2, dim=-1)
    return torch.cat([-x2, x1], dim=-1) * sin + x * cos


@_rope("full", "halves")
def rotate_half_by_unflatten(x, tables, heads_dim=1):
    cos, sin = (t.unsqueeze(heads_dim - 1) for t in tables)
    x1, x2 = x.unflatten(-1, (2, -1)).unbind(dim=-2)
    return x * cos + torch.cat((x2.neg(), x1), dim=-1) * sin


@_rope("full", "halves")
def rotate_half_in_addcmul(x, tables, heads_dim=1):
    cos, sin = (t.unsqueeze(heads_dim - 1) for t in tables)
    return torch.addcmul(x * cos, rotate_half(x), sin)


@_rope("full", "halves", restores_dtype=True)
def rotate_half_upcast(x, tables, heads_dim=1):
    cos, sin = (t[None].unsqueeze(heads_dim).float() for t in tables)
    wide = x.float()
    return ((wide * cos) + (rotate_half(wide) * sin)).to(x.dtype)


@_rope("gathered", "halves")
def rotate_half_gathered_positions(x, tables, heads_dim=1):
    cos, sin, position_ids = tables
    cos = cos[position_ids].unsqueeze(heads_dim)
    sin = sin[position_ids].unsqueeze(heads_dim)
    return (x * cos) + (rotate_half(x) * sin)


@_rope("full", "halves")
def rotate_half_with_empty_tail(x, tables, heads_dim=1):
    cos, sin = (t.unsqueeze(heads_dim - 1) for t in tables)
    width = cos.shape[-1]
    x, rest = x[..., :width], x[..., width:]  # the whole head rotates: the tail has no lanes
    x1, x2 = torch.chunk(x, 2, dim=-1)
    x = (x * cos.to(x.dtype)) + (torch.cat((-x2, x1), dim=-1) * sin.to(x.dtype))
    return torch.cat((x, rest), dim=-1)


@_rope("half", "halves")
def halves_products_in_cat(x, tables, heads_dim=1):
    c, s = (t.unsqueeze(heads_dim - 1) for t in tables)
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * c - x2 * s, x1 * s + x2 * c], dim=-1)


@_rope("full", "halves")
def halves_products_of_full_tables(x, tables, heads_dim=1):
    h = x.shape[-1] // 2
    c, s = (t[..., :h].unsqueeze(heads_dim - 1) for t in tables)
    x1, x2 = x[..., :h], x[..., h:]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1)


@_rope("half", "halves")
def halves_written_into_empty(x, tables, heads_dim=1):
    c, s = (t.unsqueeze(heads_dim - 1) for t in tables)
    h = x.shape[-1] // 2
    x1, x2 = x[..., :h], x[..., h:]
    out = torch.empty_like(x)
    out[..., :h] = x1 * c - x2 * s
    out[..., h:] = x2 * c + x1 * s
    return out


@_rope("complex", "halves", restores_dtype=True)
def halves_complex_of_stacked_chunks(x, tables, heads_dim=1):
    freqs_cis = tables[0].unsqueeze(heads_dim - 1)
    z = torch.view_as_complex(torch.stack(torch.chunk(x.float(), 2, dim=-1), dim=-1))
    real, imag = torch.view_as_real(z * freqs_cis).type_as(x).unbind(-1)
    return torch.cat((real, imag), dim=-1)


@_rope("complex", "halves", restores_dtype=True)
def halves_complex_of_transposed_view(x, tables, heads_dim=1):
    freqs_cis = tables[0].unsqueeze(heads_dim - 1)
    pairs = x.float().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
    y = torch.view_as_real(torch.view_as_complex(pairs) * freqs_cis).flatten(3)
    return torch.cat([y[..., 0::2], y[..., 1::2]], dim=-1).to(x.dtype)


@_rope("full", "neighbours", "halves")
def even_odd_slices_to_halves(x, tables, heads_dim=1):
    c, s = (t[..., : t.shape[-1] // 2].unsqueeze(heads_dim - 1) for t in tables)
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


@_rope("full", "neighbours", "halves")
def deinterleave_by_transpose_then_rotate_half(x, tables, heads_dim=1):
    cos, sin = (t[None].unsqueeze(heads_dim) for t in tables)
    a, b, c, d = x.shape
    x = x.view(a, b, c, d // 2, 2).transpose(4, 3).reshape(a, b, c, d)
    return (x * cos) + (rotate_half(x) * sin)


@_rope("full", "neighbours", "halves")
def deinterleave_by_cat_then_rotate_half(x, tables, heads_dim=1):
    cos, sin = (t.unsqueeze(heads_dim - 1) for t in tables)
    x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return (x * cos) + (torch.cat((-x2, x1), dim=-1) * sin)


@_rope("complex", "neighbours", restores_dtype=True)
def complex_view_flatten(x, tables, heads_dim=1):
    dtype = x.dtype
    x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    shape = (1, x.size(1), 1, x.size(-1)) if heads_dim == 2 else (1, 1, x.size(2), x.size(-1))
    return torch.view_as_real(x * tables[0].view(*shape)).flatten(3).to(dtype)


@_rope("complex", "neighbours", restores_dtype=True)
def complex_reshape_back_to_shape(x, tables, heads_dim=1):
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * tables[0].unsqueeze(heads_dim - 1)).reshape(*x.shape).type_as(x)


@_rope("complex", "neighbours", restores_dtype=True)
def complex_unflatten_flatten_last_two(x, tables, heads_dim=1):
    z = torch.view_as_complex(x.to(torch.float32).unflatten(-1, (-1, 2)).contiguous())
    return (torch.view_as_real(tables[0].unsqueeze(heads_dim - 1) * z)).flatten(-2).type_as(x)


@_rope("half", "neighbours")
def unbind_pairs_stack_flatten(x, tables, heads_dim=1):
    c, s = (t.unsqueeze(heads_dim - 1) for t in tables)
    x1, x2 = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), dim=-1).flatten(-2)


@_rope("stacked", "neighbours", restores_dtype=True)
def indexed_pairs_with_stacked_cache(x, tables, heads_dim=1):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cache = tables[0].float()
    cache = cache.view(1, x.size(1), 1, -1, 2) if heads_dim == 2 else cache.view(1, 1, x.size(2), -1, 2)
    first = pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1]
    second = pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


@_rope("repeated", "neighbours")
def rotate_every_two(x, tables, heads_dim=1):
    cos, sin = (t[:, None, :] if heads_dim == 2 else t for t in tables)
    x1, x2 = x[..., ::2], x[..., 1::2]
    turned = torch.stack((-x2, x1), dim=-1).flatten(-2)
    return (x * cos) + (turned * sin)


@_rope("repeated", "neighbours")
def rotate_every_two_reshaped_half_tables(x, tables, heads_dim=1):
    c, s = (t[..., ::2].unsqueeze(heads_dim - 1) for t in tables)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack([x1 * c - x2 * s, x1 * s + x2 * c], dim=-1).reshape(x.shape)


@_rope("half", "neighbours")
def even_odd_written_into_empty(x, tables, heads_dim=1):
    c, s = (t.unsqueeze(heads_dim - 1) for t in tables)
    even, odd = x[..., ::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., ::2] = even * c - odd * s
    out[..., 1::2] = even * s + odd * c
    return out


# --- RMSNorm


class Norm(nn.Module):
    """`form(norm, x)`; start: each gain's value at first."""

    def __init__(self, form, dim: int, eps: float = 1e-6, start: float = 1.0):
        super().__init__()
        self.form, self.weight, self.eps = form, nn.Parameter(torch.full((dim,), start)), eps

    def forward(self, x):
        return self.form(self, x)

    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _mean_of_product_float_gain(m, x):
    dtype, x = x.dtype, x.float()
    norm_x = torch.mean(x * x, dim=-1, keepdim=True)
    return (x * torch.rsqrt(norm_x + m.eps) * m.weight.float()).to(dtype=dtype)


def _raw_input_float_statistics(m, x):
    x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + m.eps)
    return x.type_as(m.weight) * m.weight


def _mean_then_unsqueeze(m, x):
    scale = torch.rsqrt(x.pow(2).mean(x.dim() - 1) + m.eps).unsqueeze(-1)
    return x.mul(scale).mul(m.weight)


_NORMS: dict[str, Callable[[Norm, Tensor], Tensor]] = {
    "cast_before_gain": lambda m, x: m.weight * m.scaled(x.to(torch.float32)).to(x.dtype),
    "functional_rms_norm": lambda m, x: F.rms_norm(x, (x.size(-1),), m.weight, m.eps),
    "mean_of_product_float_gain": _mean_of_product_float_gain,
    "cast_after_gain": lambda m, x: (m.weight * m.scaled(x.to(torch.float32))).to(x.dtype),
    "gain_last_type_as": lambda m, x: (m.scaled(x.float()) * m.weight).type_as(x),
    "type_as_then_gain": lambda m, x: m.scaled(x.float()).type_as(x) * m.weight,
    "raw_input_float_statistics": _raw_input_float_statistics,
    "one_plus_gain": lambda m, x: (m.scaled(x.float()) * (1.0 + m.weight.float())).type_as(x),
    "no_upcast": lambda m, x: m.scaled(x) * m.weight,
    "divide_by_sqrt": lambda m, x: x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + m.eps) * m.weight,
    "sum_over_width": lambda m, x: (
        m.weight * (x * torch.rsqrt(m.eps + x.square().sum(-1, keepdim=True) / x.shape[-1]))),
    "pow_minus_half": lambda m, x: x * (x.pow(2).mean(-1, True) + m.eps).pow(-0.5) * m.weight,
    "reciprocal_sqrt": lambda m, x: (
        m.weight * x * torch.reciprocal(torch.sqrt(torch.mean(torch.square(x), -1, keepdim=True) + m.eps))),
    "one_over_root": lambda m, x: x * (1.0 / (x.pow(2).mean(-1, keepdim=True) + m.eps).sqrt()) * m.weight,
    "gain_before_scale": lambda m, x: (
        (x * m.weight) * torch.rsqrt(torch.mean(x**2, dim=(-1,), keepdim=True).add(m.eps))),
    "mean_then_unsqueeze": _mean_then_unsqueeze,
}  # fmt: skip
NORMS: dict[str, Callable[..., nn.Module]] = {name: partial(Norm, form) for name, form in _NORMS.items()} | {
    "one_plus_gain": partial(Norm, _NORMS["one_plus_gain"], start=0.0), "nn_rms_norm": nn.RMSNorm,
}  # fmt: skip


# --- concats and splits


class ConcatSpelling(NamedTuple):
    """`query(nope, pe)`; `key(nope, pe, heads_dim)` where pe has one head that is shared by all."""

    query: Callable[..., Tensor]
    key: Callable[..., Tensor]


def _cat(nope, pe, heads_dim=1):
    return torch.cat((nope, pe), dim=-1)


def _cat_expand_heads(nope, pe, heads_dim=1):
    sizes = (-1, nope.size(1), -1, -1) if heads_dim == 1 else (-1, -1, nope.size(2), -1)
    return torch.cat([nope, pe.expand(sizes)], dim=-1)


def _cat_repeat(nope, pe, heads_dim=1):
    heads = nope.size(heads_dim)
    return torch.cat([nope, pe.repeat(1, heads, 1, 1) if heads_dim == 1 else pe.repeat(1, 1, heads, 1)], dim=3)


def _concat_broadcast_to(nope, pe, heads_dim=1):
    return torch.concat([nope, torch.broadcast_to(pe, (*nope.shape[:-1], pe.shape[-1]))], -1)


def _copy_into_new_empty(nope, pe, heads_dim=1):
    n = nope.shape[-1]
    out = nope.new_empty(*nope.shape[:-1], n + pe.shape[-1])
    out[..., :n].copy_(nope)
    out[..., n:].copy_(pe.expand(*nope.shape[:-1], -1))
    return out


def _assign_into_new_empty(nope, pe, heads_dim=1):
    a, b, c, n = nope.shape
    out = nope.new_empty(a, b, c, n + pe.shape[-1])
    out[:, :, :, :n] = nope
    out[:, :, :, n:] = pe
    return out


def _assign_into_empty(nope, pe, heads_dim=1):
    n = nope.shape[-1]
    out = torch.empty((*nope.shape[:-1], n + pe.shape[-1]), dtype=nope.dtype, device=nope.device)
    out[..., :n], out[..., n:] = nope, pe
    return out


def _assign_into_zeros(nope, pe, heads_dim=1):
    n = nope.shape[-1]
    out = torch.zeros(*nope.shape[:-1], n + pe.shape[-1], dtype=nope.dtype, device=nope.device)
    out[..., n:] = pe
    out[..., :n] = nope
    return out


CONCATS: dict[str, ConcatSpelling] = {
    "cat_expand": ConcatSpelling(_cat, lambda nope, pe, _=1: _cat(nope, pe.expand(*nope.shape[:-1], -1))),
    "cat_expand_heads": ConcatSpelling(_cat, _cat_expand_heads),
    "cat_repeat": ConcatSpelling(_cat, _cat_repeat),
    "cat_repeat_interleave": ConcatSpelling(
        _cat, lambda nope, pe, dim=1: torch.cat([nope, torch.repeat_interleave(pe, nope.size(dim), dim=dim)], dim=-1)),
    "concat_broadcast_to": ConcatSpelling(_concat_broadcast_to, _concat_broadcast_to),
    "cat_query_copy_into_new_empty_key": ConcatSpelling(_cat, _copy_into_new_empty),
    "assign_into_new_empty": ConcatSpelling(_assign_into_new_empty, _assign_into_new_empty),
    "assign_into_empty": ConcatSpelling(_assign_into_empty, _assign_into_empty),
    "assign_into_zeros": ConcatSpelling(_assign_into_zeros, _assign_into_zeros),
}  # fmt: skip

SPLITS: dict[str, Callable[[Tensor, list[int]], tuple[Tensor, Tensor]]] = {
    "torch_split": lambda t, sizes: torch.split(t, sizes, dim=-1),
    "split_method": lambda t, sizes: t.split(sizes, -1),
    "split_with_sizes": lambda t, sizes: torch.split_with_sizes(t, sizes, dim=-1),
    "slices": lambda t, sizes: (t[..., : sizes[0]], t[..., sizes[0] :]),
    "slices_from_end": lambda t, sizes: (t[..., : -sizes[1]], t[..., -sizes[1] :]),
    "narrow": lambda t, sizes: (t.narrow(-1, 0, sizes[0]), t.narrow(-1, sizes[0], sizes[1])),
    "tensor_split": lambda t, sizes: t.tensor_split([sizes[0]], dim=-1),
}


# --- attention


def sdpa(q, k, v):
    """Causal attention by the library call; tensors are (B, H, S, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))


def matmul_softmax(q, k, v):
    """Causal attention written out with matmul and a float32 softmax."""
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * q.size(-1) ** -0.5
    hidden = torch.full((q.size(2), k.size(2)), float("-inf"), device=q.device, dtype=q.dtype).triu(1)
    weights = F.softmax(scores + hidden, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def einsum_softmax(q, k, v):
    """Causal attention as einsums over (B, S, H, D), the layout of the DeepSeek reference code."""
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bshd,bthd->bsht", q, k) * q.size(-1) ** -0.5
    hidden = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(hidden[:, None, :], float("-inf")).softmax(dim=-1).type_as(q)
    return torch.einsum("bsht,bthd->bshd", weights, v).transpose(1, 2)


ATTENTIONS = {"sdpa": sdpa, "matmul_softmax": matmul_softmax, "einsum": einsum_softmax}


class _Tables(nn.Module):
    """Where RoPE tables come from when they are not arguments: buffers cut to length, or computed in the graph."""

    def __init__(self, kind: str, dim: int, source: str, keep_float: bool, longest: int = 32):
        super().__init__()
        self.kind, self.dim, self.source, self.keep_float = kind, dim, source, keep_float
        if source == "buffer":
            for i, table in enumerate(tables(kind, longest, dim)):
                self.register_buffer(f"table_{i}", table, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seq, dtype = x.size(1), torch.float32 if self.keep_float else x.dtype
        if self.source != "buffer":
            with torch.no_grad():
                return tables(self.kind, seq, self.dim, dtype, x.device)
        if self.kind == "gathered":  # the ids choose the rows
            return (self.table_0.to(dtype), self.table_1.to(dtype), torch.arange(seq, device=x.device)[None])
        cut = [getattr(self, f"table_{i}")[:seq] for i in range(1 if self.kind in ("complex", "stacked") else 2)]
        return tuple(t if t.is_complex() else t.to(dtype) for t in cut)


class _Attention(nn.Module):
    def _finish(self, spelling, rope_dim, attention, layout, table_source, seed=0):
        self.rope, self.rope_dim = ROPES[spelling], rope_dim
        self.attend = ATTENTIONS[attention]
        self.heads_dim = {"bhsd": 1, "bshd": 2}[layout]
        # nothing to hold where the caller passes tables
        self.rotary = _Tables(self.rope.table, rope_dim, table_source, self.rope.restores_dtype)
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=generator)
        jitter_gains(self)

    def example_inputs(self, batch: int = 2, seq: int = 5, dtype=torch.float32, device=None) -> tuple[Tensor, ...]:
        """Arguments for forward: x, and the tables unless the block makes its own."""
        generator = torch.Generator().manual_seed(seq)
        x = torch.randn(batch, seq, self.dim, generator=generator).to(device, dtype).requires_grad_()
        if self.rotary.source != "input":
            return (x,)
        table_dtype = torch.float32 if self.rope.restores_dtype else dtype
        return (x, *tables(self.rope.table, seq, self.rope_dim, table_dtype, device))

    def _heads(self, t: Tensor, batch: int, seq: int, heads: int) -> Tensor:
        t = t.view(batch, seq, heads, -1)
        return t.transpose(1, 2) if self.heads_dim == 1 else t

    def _attend(self, q, k, v):
        if self.heads_dim == 2:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = self.attend(q, k, v).transpose(1, 2)
        return self.o(out.reshape(*out.shape[:2], -1))


class PlainMLA(_Attention):
    """Multi-head latent attention in a chosen spelling; forward(x, *tables), tables only for table_source "input".

    norm, rope_spelling, concat, split   names in NORMS, ROPES, CONCATS, SPLITS
    layout        "bhsd" or "bshd": where the heads stand while RoPE and concat run
    down          "merged" (latent | rope key), "merged_rope_first", "separate" (a linear for each)
    up            "one_linear" (nope | v in every head), "two_linears", "split_over_heads" (all nope | all v)
    norm_to_up    "direct", "four_dim" (view to (B, 1, S, r)), "flattened" (view to (B * S, r))
    attention     a name in ATTENTIONS;  table_source  "input", "buffer" or "computed"
    """

    def __init__(
        self, dim=40, heads=3, q_lora=20, kv_lora=26, nope=16, rope=8, v=12, *, norm="cast_before_gain",
        rope_spelling="rotate_half_by_slices", concat="cat_expand", layout="bhsd", split="torch_split", down="merged",
        up="one_linear", attention="sdpa", norm_to_up="direct", table_source="input", eps=1e-6,
    ):  # fmt: skip
        super().__init__()
        self.dim, self.heads, self.kv_lora, self.nope, self.v = dim, heads, kv_lora, nope, v
        self.down, self.up, self.norm_to_up = down, up, norm_to_up
        self.concat, self.split = CONCATS[concat], SPLITS[split]
        norm = NORMS[norm]
        if q_lora:
            self.q_a = nn.Linear(dim, q_lora, bias=False)
            self.q_norm = norm(q_lora, eps=eps)
        self.q_b = nn.Linear(q_lora or dim, heads * (nope + rope), bias=False)
        self.kv_a = nn.Linear(dim, kv_lora + (0 if down == "separate" else rope), bias=False)
        if down == "separate":
            self.k_rope = nn.Linear(dim, rope, bias=False)
        self.kv_norm = norm(kv_lora, eps=eps)
        if up == "two_linears":
            self.k_b = nn.Linear(kv_lora, heads * nope, bias=False)
            self.v_b = nn.Linear(kv_lora, heads * v, bias=False)
        else:
            self.kv_b = nn.Linear(kv_lora, heads * (nope + v), bias=False)
        self.o = nn.Linear(heads * v, dim, bias=False)
        self._finish(rope_spelling, rope, attention, layout, table_source)

    @staticmethod
    def expected(*, q_lora: int | None = 20, down: str = "merged", up: str = "one_linear", **_) -> dict[str, int | str]:
        """What must fire in a block with these constructor arguments."""
        q = 1 if q_lora else 0
        # the op norms the leading part of the down output and has one up weight; more is welcome, not demanded
        kv_optional = up == "two_linears" or down == "merged_rope_first"
        return {
            "down_norm_up": f"{q}..{q + 1}" if kv_optional else q + 1,
            "mla_rope_q": 1,
            "mla_rope_kv": 1 if up == "one_linear" else "1?",
        }

    def _reshaped(self, latent: Tensor) -> Tensor:
        if self.norm_to_up == "four_dim":
            return latent.view(latent.size(0), 1, latent.size(1), latent.size(2))
        return latent.view(-1, latent.size(-1)) if self.norm_to_up == "flattened" else latent

    def _query(self, x: Tensor) -> Tensor:
        return self.q_b(self._reshaped(self.q_norm(self.q_a(x))) if hasattr(self, "q_a") else x)

    def _latent_and_rope_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.down == "separate":
            return self.kv_a(x), self.k_rope(x)
        if self.down == "merged":
            return self.split(self.kv_a(x), [self.kv_lora, self.rope_dim])
        rope_key, latent = self.split(self.kv_a(x), [self.rope_dim, self.kv_lora])
        return latent, rope_key

    def _keys_and_values(self, latent: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor]:
        shape, sizes = (batch, seq, self.heads), [self.nope, self.v]
        if self.up == "one_linear":
            return self.split(self._heads(self.kv_b(latent), *shape), sizes)
        if self.up == "two_linears":
            return self._heads(self.k_b(latent), *shape), self._heads(self.v_b(latent), *shape)
        k, v = self.split(self.kv_b(latent), [self.heads * n for n in sizes])
        return self._heads(k.reshape(batch, seq, -1), *shape), self._heads(v.reshape(batch, seq, -1), *shape)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        tables = tables or self.rotary(x)
        batch, seq, _ = x.shape
        q = self._heads(self._query(x), batch, seq, self.heads)
        q_nope, q_pe = self.split(q, [self.nope, self.rope_dim])
        latent, k_pe = self._latent_and_rope_key(x)
        k_nope, v = self._keys_and_values(self._reshaped(self.kv_norm(latent)), batch, seq)
        q_pe = self.rope.rotate(q_pe, tables, self.heads_dim)
        k_pe = self.rope.rotate(k_pe.unsqueeze(self.heads_dim), tables, self.heads_dim)
        return self._attend(self.concat.query(q_nope, q_pe), self.concat.key(k_nope, k_pe, self.heads_dim), v)


class PlainGQA(_Attention):
    """Grouped-query attention whose whole heads rotate; forward(x, *tables) as in PlainMLA.

    projections   "separate" (q, k, v) or "fused" (one linear, then split);  qk_norm   a name in NORMS or None
    """

    def __init__(
        self, dim=40, heads=6, kv_heads=2, head_dim=14, *, rope_spelling="rotate_half_by_slices", layout="bhsd",
        projections="separate", qk_norm=None, attention="sdpa", table_source="input", eps=1e-6,
    ):  # fmt: skip
        super().__init__()
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        if projections == "fused":
            self.qkv = nn.Linear(dim, sum(self.sizes), bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(dim, size, bias=False) for size in self.sizes)
        self.q_norm, self.k_norm = (NORMS[qk_norm](head_dim, eps=eps) if qk_norm else nn.Identity() for _ in range(2))
        self.o = nn.Linear(heads * head_dim, dim, bias=False)
        self._finish(rope_spelling, head_dim, attention, layout, table_source)

    @staticmethod
    def expected(**_) -> dict[str, int | str]:
        """What must fire in a block with these constructor arguments."""
        return {"rope_qk": 1, "mla_rope_kv": 0, "down_norm_up": 0}

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        tables = tables or self.rotary(x)
        batch, seq, _ = x.shape
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q = self.q_norm(self._heads(q, batch, seq, self.heads))
        k = self.k_norm(self._heads(k, batch, seq, self.kv_heads))
        v = self._heads(v, batch, seq, self.kv_heads)
        q = self.rope.rotate(q, tables, self.heads_dim)
        k = self.rope.rotate(k, tables, self.heads_dim)
        return self._attend(q, k, v)
