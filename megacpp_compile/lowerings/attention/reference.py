"""`attention` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype, wide
from megacpp_compile.lowerings.attention._dropout import dropped, factors
from megacpp_compile.lowerings.attention._layout import laid_out
from megacpp_compile.lowerings.attention._sinks import of_rows, sinks_gradient


class _Scores(NamedTuple):
    """Scores [b, h, t, s]; capped: those that the bias is added to; near: which of them are those of keys that a query
    sees by distance and document, None for all."""

    scores: Tensor
    capped: Tensor
    near: Tensor | None


def seen(
    t: int, s: int, left: int | None, right: int | None, device: torch.device, prefix: Tensor | None = None
) -> Tensor | None:
    """bool [t, s], with a prefix [b or 1, 1, t, s]: whether query i sees key j by their distance; None where each sees
    all."""
    if left is None and right is None:
        return None
    # Compared, not subtracted, and in 32 bits: what a CPU has vectors for.
    queries, keys = (torch.arange(n, dtype=torch.int32, device=device) for n in (t, s))
    queries = queries[:, None]
    parts = ([] if right is None else [keys <= queries + right]) + ([] if left is None else [keys >= queries - left])
    if right is not None and prefix is not None:
        parts[0] = parts[0] | (keys < prefix[:, None, None, None])
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


def grouped(x: Tensor, groups: int) -> Tensor:
    """[b, h, t, d] as [b, groups, h / groups, t, d]."""
    return x.unflatten(1, (groups, x.shape[1] // groups))


def scores_of(
    q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, documents: Tensor | None, scale: float,
    softcap: float, left: int | None, right: int | None, fill: float, prefix: Tensor | None,
) -> _Scores:  # fmt: skip
    products = (grouped(q, k.shape[1]) @ k.unsqueeze(2).mT).flatten(1, 2).to(compute_dtype(q)) * scale
    scores = capped = products if softcap == 0 else softcap * torch.tanh(products / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = torch.where(mask, scores, fill)
    near = seen(q.shape[2], k.shape[2], left, right, q.device, prefix)
    if documents is not None:
        same = (documents[:, :, None] == documents[:, None])[:, None]
        near = same if near is None else near & same
    return _Scores(scores if near is None else scores.masked_fill(~near, float("-inf")), capped, near)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    fill: float,
    words: Tensor | None = None,
    dropout: float = 0.0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    given, like, (q, k, v) = v.dtype, q, wide(q, k, v)
    scores, *_ = scores_of(q, k, mask, bias, documents, scale, softcap, left, right, fill, prefix)
    top = scores.amax(-1)
    if sinks is not None:
        top = torch.maximum(top, of_rows(sinks).to(top.dtype))
    weights = (scores - top.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (of_rows(sinks) - top).exp()
    weights = dropped(weights / total.unsqueeze(-1), factors(words, dropout, weights))
    out = laid_out((grouped(weights, v.shape[1]) @ v.unsqueeze(2)).flatten(1, 2).to(given), like)
    return (out, total.log() + top, top.new_empty(0)) if mask is None and bias is None else (out, total.log(), top)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
    scale: float,
    softcap: float,
    left: int | None,
    right: int | None,
    fill: float,
    bias_grad: bool,
    words: Tensor | None = None,
    dropout: float = 0.0,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given, groups, like = q.dtype, k.shape[1], (q, k, v)
    grad, out, q, k, v = wide(grad, out, q, k, v)
    scores, capped, near = scores_of(q, k, mask, bias, documents, scale, softcap, left, right, fill, prefix)
    if mask is not None or bias is not None:
        scores = scores - top.unsqueeze(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    delta, by = (grad * out).sum(-1), factors(words, dropout, weights)
    grad = grouped(grad, groups)
    dv = (grouped(dropped(weights, by), groups).mT @ grad).sum(2)
    dweights = dropped((grad @ v.unsqueeze(2).mT).flatten(1, 2), by)
    dscores = weights * (dweights - delta.unsqueeze(-1))
    for visible in (mask, near):  # a key that is hidden has no gradient, be that of its query no number
        if visible is not None:
            dscores = torch.where(visible, dscores, 0)
    dbias, dsinks = (q.new_empty(0, dtype=given) for _ in range(2))
    if bias_grad and bias is not None:
        dbias = dscores.sum_to_size(bias.shape).to(bias.dtype)
    if sinks is not None:
        dsinks = sinks_gradient(sinks, lse, top, delta)
    if softcap != 0:
        dscores = dscores * (1 - (capped / softcap) ** 2)
    dscores = grouped(dscores * scale, groups)
    dq = (dscores @ k.unsqueeze(2)).flatten(1, 2)
    dk = (dscores.mT @ grouped(q, groups)).sum(2)
    dq, dk, dv = (laid_out(x.to(given), as_one) for x, as_one in zip((dq, dk, dv), like, strict=True))
    return dq, dk, dv, dbias, dsinks
