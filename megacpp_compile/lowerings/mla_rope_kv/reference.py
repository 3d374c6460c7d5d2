"""`mla_rope_kv` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.rotation import by_sequence, join_head, rotate, split_head


def mla_rope_kv(
    kv: Tensor,
    k_rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    rope_first: bool,
    out_dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
    turn: Callable[..., Tensor] = rotate,
) -> tuple[Tensor, Tensor]:
    cos, sin = (by_sequence(t, cu_seqlens, kv.shape[0]) for t in (cos, sin))
    rotated = turn(
        k_rope,
        cos,
        sin,
        interleaved_in=interleaved_in,
        interleaved_out=interleaved_out,
        inverse=False,
        dtype=out_dtype,
    )
    k_nope = kv[..., :nope_dim].to(out_dtype)
    shared = rotated.expand(*kv.shape[:-1], rotated.shape[-1])
    return join_head(k_nope, shared, rope_first), kv[..., nope_dim:]


def mla_rope_kv_backward(
    grad_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    rope_first: bool,
    shared_dims: list[int],
    kv_dtype: torch.dtype,
    rope_dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
    turn: Callable[..., Tensor] = rotate,
) -> tuple[Tensor, Tensor]:
    cos, sin = (by_sequence(t, cu_seqlens, grad_k.shape[0]) for t in (cos, sin))
    grad_nope, grad_rope = split_head(grad_k, nope_dim, rope_first)
    # The shared key row is one tensor read by every head: its gradient is the sum over them, taken before the
    # rotation because both are linear and the sum is the smaller tensor.
    if shared_dims:
        grad_rope = grad_rope.sum(shared_dims, keepdim=True)
    d_rope = turn(
        grad_rope,
        cos,
        sin,
        interleaved_in=interleaved_in,
        interleaved_out=interleaved_out,
        inverse=True,
        dtype=rope_dtype,
    )
    return torch.cat((grad_nope.to(kv_dtype), grad_v.to(kv_dtype)), -1), d_rope
