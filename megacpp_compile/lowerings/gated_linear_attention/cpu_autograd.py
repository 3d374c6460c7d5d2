"""`gated_linear_attention` on a CPU over few tokens: one triangle, or with a gate a channel one step after the other,
which autograd differentiates and Inductor fuses, where the reference is a call for each of its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.decays import LEAST
from megacpp_compile.lowerings._kernels.gated_chunks import not_few
from megacpp_compile.lowerings._op import compute_dtype

# Where the op comes late, as under a policy, its backward is the other's.
from megacpp_compile.lowerings.gated_linear_attention.reference import gated_linear_attention_backward
from megacpp_compile.lowerings.ssd_scan.reference import Float64Sums

__all__ = ["AHEAD", "gated_linear_attention", "gated_linear_attention_backward", "supports"]

AHEAD = True
# Tokens of a triangle, and of steps; up to eight chunks, of which the first state alone is kept.
TRIANGLE, STEPS = 128, 16


def supports(name: str, args: Sequence[Any]) -> str | None:
    _, _, v, g, _, cu_seqlens = args[2:8] if name.endswith("_backward") else args[:6]
    most = STEPS if g is not None and g.dim() == 4 else TRIANGLE
    return not_few(v.shape[1], most, cu_seqlens)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, chunk_size: int, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, b, h = compute_dtype(q, k, v, g, initial_state), v.shape[0], v.shape[2]
    q, k = (x.to(dtype).repeat_interleave(h // q.shape[2], 2).transpose(1, 2) for x in (q, k))  # [b, h, t, k]
    v, g = v.to(dtype).transpose(1, 2), None if g is None else g.to(dtype).transpose(1, 2)
    first = None if initial_state is None else initial_state.to(dtype)
    q = q * scale
    o, final = _steps(q, k, v, g, first) if g is not None and g.dim() == 4 else _triangle(q, k, v, g, first)
    kept = v.new_zeros(b, h, q.shape[-1], v.shape[-1]) if first is None else first
    return o.transpose(1, 2).to(out_dtype).contiguous(), final.clone(), kept.unsqueeze(1).clone()


def _triangle(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
    sums = Float64Sums.prefix(v.new_zeros(v.shape[:3]) if g is None else g.clamp(min=LEAST))  # [b, h, t]
    n = torch.arange(v.shape[2], device=v.device)
    apart = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(v.dtype)
    o = (q @ k.mT * torch.where(n.unsqueeze(-1) >= n, apart, -torch.inf).exp()) @ v
    final = (k * (sums[..., -1:] - sums).to(v.dtype).exp().unsqueeze(-1)).mT @ v
    if first is not None:
        o = o + (q * sums.to(v.dtype).exp().unsqueeze(-1)) @ first
        final = final + sums[..., -1:].to(v.dtype).exp().unsqueeze(-1) * first
    return o, final


def _steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    decay, state, read = g.exp(), first, []
    for i in range(v.shape[2]):
        added = k[:, :, i, :, None] * v[:, :, i, None]
        state = added if state is None else decay[:, :, i, :, None] * state + added
        read.append((q[:, :, i, :, None] * state).sum(-2))
    assert state is not None
    return torch.stack(read, 2), state
