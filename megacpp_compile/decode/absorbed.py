"""Latent attention over cached rows, in the cheaper of its two forms.

    absorbed   (q_nope W_uk) . latent + q_rope . rope row: queries go to the latent's channels, one op attends over the
               rows as they are cached, and W_uv is applied to what comes out
    expanded   the rows' latents are multiplied by the up-projection again, and each head attends over keys and values

Both are the same attention: (q W_uk) c = q (W_uk c), at the scale of the expanded head. With latents alone in the cache
the expanded form multiplies every row by the up-projection at each step, r (nope + v) multiply-adds a head; a query
takes r + p + r of them a row and head absorbed, and nope + p + v expanded. Absorbed takes fewer below some 170 new
tokens at 512 + 64 and 128 + 64 + 128 channels.

W_uk and W_uv are views of the up-projection's weight: a weight that is loaded or trained anew is the one that is used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megacpp_compile.decode.cache import CachedRows
from megacpp_compile.errors import AbsorbedInTrainingError, OperandError
from megacpp_compile.report.log import logger

FORMS = ("auto", "absorbed", "expanded")


@dataclass(frozen=True)
class Form:
    """Which form a step takes, and why.

    Attributes:
        absorbed: whether it is the absorbed one.
        by: "counts" or "caller".
        absorbed_multiply_adds: of a step of one layer and sequence.
        expanded_multiply_adds: likewise.
    """

    absorbed: bool
    by: str
    absorbed_multiply_adds: int
    expanded_multiply_adds: int

    def __str__(self) -> str:
        name = "absorbed" if self.absorbed else "expanded"
        counts = f"{self.absorbed_multiply_adds} multiply-adds absorbed, {self.expanded_multiply_adds} expanded"
        return f"{name} by {self.by}: {counts}"


class LowRank(NamedTuple):
    """Ranks of what is beside the up-projection (LoRA), in all: beside W_uk, beside W_uv, and of the distinct matrices
    that narrow a latent, which keys and values may share."""

    keys: int = 0
    values: int = 0
    narrowed: int = 0


def choose_form(
    tokens: int,
    rows: int,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    latent_dim: int,
    form: str = "auto",
    low_rank: LowRank | None = None,
) -> Form:
    """The form with fewer multiply-adds for a step of `tokens` over `rows` cached rows, or the one asked for.

    Raises OperandError for a form that is none of FORMS.
    """
    if form not in FORMS:
        raise OperandError("latent_attention", f"form is {form!r}, wanted one of {', '.join(FORMS)}")
    projected = tokens * latent_dim * (nope_dim + v_dim)  # queries by W_uk, and results by W_uv
    absorbed = heads * (projected + tokens * rows * (2 * latent_dim + rope_dim))
    expanded = heads * rows * (latent_dim * (nope_dim + v_dim) + tokens * (nope_dim + rope_dim + v_dim))
    low_rank = low_rank or LowRank()
    absorbed += heads * tokens * (low_rank.keys * (nope_dim + latent_dim) + low_rank.values * (v_dim + latent_dim))
    expanded += rows * (low_rank.narrowed * latent_dim + heads * (low_rank.keys * nope_dim + low_rank.values * v_dim))
    if form != "auto":
        return Form(form == "absorbed", "caller", absorbed, expanded)
    return Form(absorbed <= expanded, "counts", absorbed, expanded)


def split_up_projection(weight: Tensor, heads: int, nope_dim: int) -> tuple[Tensor, Tensor]:
    """(W_uk [heads, nope, latent], W_uv [heads, v, latent]): views of the up-projection's weight [heads * (nope + v),
    latent], whose rows are head after head, keys before values."""
    by_head = weight.unflatten(0, (heads, -1))
    return by_head[:, :nope_dim], by_head[:, nope_dim:]


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    rows: CachedRows,
    up_weight: Tensor,
    *,
    scale: float | None = None,
    form: str = "auto",
) -> Tensor:
    """Attention of a step's queries over a layer's cached rows: [b, t, heads, v], for the output projection.

    Args:
        q_nope: [b, t, heads, nope], the queries' channels without position.
        q_rope: [b, t, heads, rope], rotated for the positions of the t newest rows.
        rows: what `MLAKVCache.update` returned for this step.
        up_weight: [heads * (nope + v), latent], of the projection of a latent to all heads' keys and values.
        scale: of the scores; (nope + rope) ** -0.5 by default, that of the expanded head.
        form: "auto", the one with fewer multiply-adds (`choose_form`); "absorbed"; "expanded".

    Inference only. Raises AbsorbedInTrainingError where an operand or the weight requires a gradient and grad mode is
    on, and OperandError for shapes that do not belong together.
    """
    batch, tokens, heads, nope_dim = q_nope.shape
    if q_rope.shape != (batch, tokens, heads, rows.rope_dim) or up_weight.shape[-1] != rows.latent_dim:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q_nope, q_rope, up_weight))
        raise OperandError("latent_attention", f"q_nope, q_rope and up_weight are {shapes}; rows have "
                           f"{rows.latent_dim} + {rows.rope_dim} channels")  # fmt: skip
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q_nope, q_rope, up_weight)):
        raise AbsorbedInTrainingError("latent_attention", rows.latent_dim + rows.rope_dim, rows.latent_dim)
    scale = (nope_dim + rows.rope_dim) ** -0.5 if scale is None else scale
    w_uk, w_uv = split_up_projection(up_weight, heads, nope_dim)
    capacity = rows.stored[0].shape[1]
    chosen = choose_form(tokens, capacity, heads, nope_dim, rows.rope_dim, w_uv.shape[1], rows.latent_dim, form)
    if not torch.compiler.is_compiling():
        _announce(chosen)
    if not chosen.absorbed:
        return _expanded(q_nope, q_rope, rows, w_uk, w_uv, scale)
    queries = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, w_uk), q_rope), -1)
    latents = rows.format.attend(queries, rows.stored, rows.length, scale, rows.latent_dim)
    return torch.einsum("bthr,hvr->bthv", latents, w_uv)


@functools.lru_cache(maxsize=64)
def _announce(chosen: Form) -> None:
    logger.info("latent attention: %s", chosen)


def _expanded(q_nope: Tensor, q_rope: Tensor, rows: CachedRows, w_uk: Tensor, w_uv: Tensor, scale: float) -> Tensor:
    kept = rows.rows
    latent, rope = kept[..., : rows.latent_dim], kept[..., rows.latent_dim :]
    heads, tokens = q_nope.shape[2], q_nope.shape[1]
    k_nope = torch.einsum("bsr,hnr->bhsn", latent, w_uk)
    keys = torch.cat((k_nope, rope.unsqueeze(1).expand(-1, heads, -1, -1)), -1)
    values = torch.einsum("bsr,hvr->bhsv", latent, w_uv)
    queries = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
    place = torch.arange(latent.shape[1], device=latent.device)
    last = rows.length[:, None] - tokens + torch.arange(tokens, device=latent.device)
    seen = (place <= last[..., None]).unsqueeze(1)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
    return out.transpose(1, 2)
