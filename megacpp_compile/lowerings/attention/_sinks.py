"""Sinks of `attention`, which are [h] or broadcast to rows [b, h, t]: one more logit for each row of scores."""

from __future__ import annotations

from torch import Tensor


def of_rows(sinks: Tensor) -> Tensor:
    """As they broadcast to rows [b, h, t]."""
    return sinks.unsqueeze(1) if sinks.dim() == 1 else sinks


def sinks_gradient(sinks: Tensor, lse: Tensor, top: Tensor, delta: Tensor) -> Tensor:
    """In the dtype of `sinks`. lse, top: as `attention` gives them; delta: [b, h, t], of each row the sum over its
    result's gradient times the result."""
    logits = of_rows(sinks).to(lse.dtype)
    probabilities = ((logits - top if top.dim() > 1 else logits) - lse).exp()
    found = -(probabilities * delta)
    return (found.sum((0, 2)) if sinks.dim() == 1 else found.sum_to_size(sinks.shape)).to(sinks.dtype)
