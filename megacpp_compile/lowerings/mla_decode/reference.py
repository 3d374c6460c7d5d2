"""`mla_decode` in plain PyTorch: its meaning, its lowering on CPU and XLA, and the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import widened
from megacpp_compile.lowerings._op import compute_dtype


def unpacked(payload: Tensor, d_v: int) -> Tensor:
    """[..., 2 w] int64, the 4 bits of each channel, of bytes [..., w]."""
    parts = payload[..., : d_v // 2], payload[..., d_v // 2 :]
    # Bit operations in int32: of bytes XLA shifts none.
    codes = [half for part in parts for half in (part.int() & 15, part.int() >> 4)]
    return torch.cat(codes, -1).long()


def decoded(rows: Tensor, row_scale: Tensor | None, codebook: Tensor | None, d_v: int, dtype: torch.dtype) -> Tensor:
    """The rows [b, s, d_qk] in `dtype`."""
    if row_scale is None:
        return rows.to(dtype)
    scale = row_scale.to(dtype)
    if codebook is None:
        return widened(rows, dtype) * scale
    values = codebook.to(dtype)[unpacked(rows, d_v)]
    return torch.cat((values[..., :d_v] * scale[..., :1], values[..., d_v:] * scale[..., 1:]), -1)


def mla_decode(
    q: Tensor,
    rows: Tensor,
    lengths: Tensor,
    row_scale: Tensor | None,
    codebook: Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q.dtype)
    place = torch.arange(rows.shape[1], device=q.device)
    last = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
    seen = (place <= last[..., None]) & (place < lengths[:, None, None])  # [b, t, s]
    # What is beyond may be no number, which a probability of 0 would not make one.
    there = (place < lengths[:, None]).unsqueeze(-1)
    keys = torch.where(there, decoded(rows, row_scale, codebook, d_v, dtype), 0)
    logits = torch.einsum("bthd,bsd->bths", q.to(dtype), keys) * scale
    logits = torch.where(seen.unsqueeze(2), logits, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - torch.where(lse.isneginf(), 0, lse).unsqueeze(-1))
    out = torch.einsum("bths,bsd->bthd", p, keys[..., :d_v])
    return out.to(q.dtype).contiguous(), lse.contiguous()
