"""`megacpp::mla_rope_kv`: the keys of multi-latent attention, with the one shared rope row behind every head.

    kv         [..., nope_dim + v_dim]  the up-projected latent, per head; v_dim may be 0
    k_rope     as many dimensions as kv, 1 where it is shared (the heads); last one r
    cos, sin   as many dimensions as kv, each leading one 1 or k_rope's; last one r or r/2 (see `rotation`)
    cu_seqlens [sequences + 1] or None: kv and k_rope are packed, [tokens, heads, channels], and the tables
               [positions, 1, ...] are read by the token's position in its own sequence (`rotation.by_sequence`)
    returns    k [..., nope_dim + r] contiguous in `out_dtype`, and v = kv[..., nope_dim:], a view of kv once lowered

Backward writes the gradients of k and v into one buffer. Saved for backward: the tables alone.
Upstream: Megatron-Core `fused_mla_yarn_rope_apply.py`, DeepSeek-V3 `modeling_deepseek_v3.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import define_op, wide
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.mla_rope_kv import reference


def _outside(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    # A custom op may not return a view of its input, so this copies; lowered graphs take the view.
    k, v = reference.mla_rope_kv(kv.clone(), *wide(k_rope, cos, sin), *others)
    return k.contiguous(), v


@define_op(reference.mla_rope_kv, outside=_outside)
def mla_rope_kv(  # type: ignore[no-untyped-def]
    kv, k_rope, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, out_dtype, cu_seqlens=None
):
    k = kv.new_empty((*kv.shape[:-1], nope_dim + k_rope.shape[-1]), dtype=out_dtype)
    return k, torch.empty_like(kv)[..., nope_dim:]  # with kv's strides, as the view it becomes


def _backward_outside(grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    d_kv, d_rope = reference.mla_rope_kv_backward(*wide(grad_k, grad_v, cos, sin), *others)
    return d_kv.contiguous(), d_rope.contiguous()


@define_op(reference.mla_rope_kv_backward, outside=_backward_outside)
def mla_rope_kv_backward(  # type: ignore[no-untyped-def]
    grad_k, grad_v, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, shared_dims, kv_dtype, rope_dtype,
    cu_seqlens=None,
):  # fmt: skip
    outer = grad_k.shape[:-1]
    shared = [1 if i in shared_dims else n for i, n in enumerate(outer)]
    d_kv = grad_k.new_empty((*outer, nope_dim + grad_v.shape[-1]), dtype=kv_dtype)
    return d_kv, grad_k.new_empty((*shared, grad_k.shape[-1] - nope_dim), dtype=rope_dtype)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    kv, k_rope, cos, sin, *ctx.flags, _, cu_seqlens = inputs
    ctx.save_for_backward(cos, sin, *([] if cu_seqlens is None else [cu_seqlens]))
    ctx.shared_dims = [i for i, n in enumerate(k_rope.shape[:-1]) if isinstance(n, int) and n == 1]
    ctx.dtypes = (kv.dtype, k_rope.dtype)


def _backward(ctx, grad_k, grad_v):  # type: ignore[no-untyped-def]
    cos, sin, *packed = ctx.saved_tensors
    d_kv, d_rope = mla_rope_kv_backward(grad_k, grad_v, cos, sin, *ctx.flags, ctx.shared_dims, *ctx.dtypes, *packed)
    return d_kv, d_rope, *(None,) * 8


mla_rope_kv.register_autograd(_backward, setup_context=_setup_context)

declare(
    {
        "megacpp::mla_rope_kv": OpTraits(block_kind="ablock", up_projection="kv"),
        "megacpp::mla_rope_kv_backward": OpTraits(),
    }
)
