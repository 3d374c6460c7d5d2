"""`index_scores` in plain ATen: one batched GEMM of all heads' queries with the keys that these share.

Written as `matmul(q, k.transpose(-1, -2).unsqueeze(1))`, torch makes a copy of the keys for each query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype


def products(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """q k of every query and head with every key, [batch, queries, heads, keys]."""
    rows = q.to(dtype).flatten(1, 2)
    return torch.bmm(rows, k.to(dtype).transpose(1, 2)).unflatten(1, q.shape[1:3])


def index_scores(q: Tensor, k: Tensor, weights: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    dtype = compute_dtype(q, k, weights)
    positive = torch.relu(products(q, k, dtype) * scale)
    return (weights.to(dtype).unsqueeze(-1) * positive).sum(2).to(out_dtype)


def index_scores_backward(
    grad: Tensor, q: Tensor, k: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q, k, weights)
    scaled, wide = products(q, k, dtype) * scale, grad.to(dtype).unsqueeze(2)
    d_weights = (wide * torch.relu(scaled)).sum(-1)
    # Selected, not multiplied: what is not positive has no gradient, whatever comes from above.
    d = torch.where(scaled <= 0, 0.0, wide * weights.to(dtype).unsqueeze(-1)).flatten(1, 2) * scale
    d_q = torch.bmm(d, k.to(dtype)).view(q.shape)
    d_k = torch.bmm(d.transpose(1, 2), q.to(dtype).flatten(1, 2))
    return d_q.to(q.dtype), d_k.to(k.dtype), d_weights.to(weights.dtype)
