"""Attention by torch's own operations, and what each way of it lacks.

Each body takes (q, k, v, doc_ids, softcap, scale, causal, window) as `attention` documents them, with ids on the
device or None. Each `*_lacks` returns None, or (tag, reason).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megacpp_compile.lowerings.attention.reference import seen

# Why a backend cannot serve a call.
TAGS = ("doc-ids", "softcap", "window", "backward", "width", "dtype", "shape", "device", "no-pallas", "spmd", "no-te",
        "graph-break")  # fmt: skip

Lack = tuple[str, str] | None


def plain_lacks(*_: Any) -> Lack:
    return None


def plain(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None, softcap: float | None, scale: float, causal: bool,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention by its definition, the oracle of the other bodies. Materialises the scores, [B, H, S, T] in float32."""
    batch, heads, tokens, _ = q.shape
    groups, keys = k.shape[1:3]
    # Heads that share a key are rows of one GEMM: keys are read, not repeated.
    rows = q.reshape(batch, groups, heads // groups * tokens, q.shape[-1])
    scores = (rows @ k.transpose(-1, -2)).view(batch, groups, heads // groups, tokens, keys)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keep = seen(tokens, keys, None if window is None else window - 1, 0 if causal else None, q.device)
    if doc_ids is not None:  # padding sees padding, and is made zeros after
        same = (doc_ids[:, :, None] == doc_ids[:, None])[:, None, None]
        keep = same if keep is None else keep & same
    if keep is not None:
        # Not -inf: a row without a key, as of a window beyond the last, would become NaN, and its gradient too.
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).to(v.dtype).view(batch, groups, -1, keys)
    out = (weights @ v).view(batch, heads, tokens, v.shape[-1])
    return out if doc_ids is None else without_padding(out, doc_ids)


def without_padding(out: Tensor, doc_ids: Tensor) -> Tensor:
    """`out` [B, H, S, E] with rows of zeros, and no gradient, for tokens with a negative id."""
    return out.masked_fill((doc_ids < 0)[:, None, :, None], 0)


def sdpa_lacks(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None, causal: bool, window: int | None = None
) -> Lack:
    if window is not None:
        return "window", "scaled_dot_product_attention takes a window as a mask of all scores only"
    if softcap is not None:
        return "softcap", "scaled_dot_product_attention caps no scores"
    if doc_ids is not None:
        return "doc-ids", "scaled_dot_product_attention takes documents as a mask of all scores only"
    return None


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: Any, scale: float, causal: bool, window: Any = None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def flex_lacks(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Any, softcap: float | None, causal: bool, window: int | None = None
) -> Lack:
    if q.device.type not in ("cuda", "cpu"):
        return "device", f"FlexAttention has nothing for {q.device.type}"
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "backward", "FlexAttention has no backward on CPU"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "dtype", f"FlexAttention does not compute in {q.dtype}"
    if q.device.type == "cuda" and min(q.shape[-1], v.shape[-1]) < 16:
        return "width", f"FlexAttention wants heads of 16 channels or more, not {min(q.shape[-1], v.shape[-1])}"
    return None


def flex(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None, softcap: float | None, scale: float, causal: bool,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """FlexAttention (arXiv:2412.05496): blocks of scores between documents, or behind the diagonal, are left out."""

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = j <= i if causal else j >= 0
        kept = kept if window is None else kept & (j > i - window)
        return kept if doc_ids is None else kept & (doc_ids[b, i] == doc_ids[b, j]) & (doc_ids[b, j] >= 0)

    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    blocks = None
    if causal or doc_ids is not None:
        rows = None if doc_ids is None else q.shape[0]
        blocks = _flex("create_block_mask", q.device.type)(
            keep, rows, None, q.shape[2], k.shape[2], device=str(q.device)
        )
    grouped = q.shape[1] != k.shape[1]
    out = _flex("flex_attention", q.device.type)(
        q, k, v, score_mod=cap if softcap is not None else None, block_mask=blocks, scale=scale, enable_gqa=grouped
    )
    return out if doc_ids is None else without_padding(out, doc_ids)


def _flex(name: str, device: str) -> Callable[..., Any]:
    """FlexAttention's function `name`, compiled unless a compiler is tracing or `device` is the CPU: uncompiled it
    materialises all scores."""
    from torch.nn.attention import flex_attention as home

    return getattr(home, name) if device == "cpu" or torch.compiler.is_compiling() else _compiled(name)


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as home

    return torch.compile(getattr(home, name))  # type: ignore[no-any-return]
