"""`gated_linear_attention` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle; the
recurrence by chunk of `_kernels.gated_chunks` as it stands. A loop over chunks carries the state, so that graphs hold
the op."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.gated_chunks import GatedChunks
from megacpp_compile.lowerings._op import compute_dtype

# A loop over chunks, of which there may be any number.
TRACED = False


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    out_dtype: torch.dtype,
    chunks: type[GatedChunks] = GatedChunks,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q, k, v, g, initial_state)
    return chunks(q, k, v, g, initial_state, cu_seqlens, chunk_size, dtype).forward(scale, out_dtype)


def gated_linear_attention_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    scale: float,
    chunk_size: int,
    chunks: type[GatedChunks] = GatedChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and initial_state, empty where there is none."""
    x = chunks(q, k, v, g, initial_state, cu_seqlens, chunk_size, states.dtype)
    d = x.backward(do, dfinal, states, scale)
    d_g, d_initial = (states.new_empty(0) for _ in range(2))
    if g is not None and d.gates is not None:
        d_g = d.gates.reshape(g.shape).to(g.dtype).contiguous()
    if initial_state is not None:
        d_initial = d.initial.to(initial_state.dtype).contiguous()
    return (
        x.by_key_head(d.q).sum(3).to(q.dtype).contiguous(),
        x.by_key_head(d.k).sum(3).to(k.dtype).contiguous(),
        x.grid.join(d.v).to(v.dtype).contiguous(),
        d_g,
        d_initial,
    )
