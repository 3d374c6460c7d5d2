"""`megacpp::rope_qk`: rotate queries and keys of ordinary (grouped-query) attention with one pair of tables.

    q, k       [..., nope_dim + r]  as many dimensions each; head counts may differ
    cos, sin   as many dimensions as q, each leading one 1 or q's and k's; last one r or r/2 (see `rotation`)
    cu_seqlens [sequences + 1] or None: q and k are packed, [tokens, heads, channels], and the tables
               [positions, 1, ...] are read by the token's position in its own sequence (`rotation.by_sequence`)
    returns    q and k rotated, in `out_dtype`, contiguous

`nope_dim` channels pass through unrotated (partial rotary; 0 for full heads), before the rotated ones or, with
`rope_first`, behind them. The op is its own backward (`inverse`). Saved for backward: the tables alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import define_op, wide
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.rope_qk import reference


def _outside(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    q, k = reference.rope_qk(*wide(q, k, cos, sin), *others)
    return q.contiguous(), k.contiguous()


@define_op(reference.rope_qk, outside=_outside)
def rope_qk(  # type: ignore[no-untyped-def]
    q, k, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, inverse, out_dtype, cu_seqlens=None
):
    return q.new_empty(q.shape, dtype=out_dtype), k.new_empty(k.shape, dtype=out_dtype)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, cos, sin, *flags, _, cu_seqlens = inputs
    ctx.save_for_backward(cos, sin, *([] if cu_seqlens is None else [cu_seqlens]))
    ctx.flags, ctx.dtypes = flags, (q.dtype, k.dtype)


def _backward(ctx, grad_q, grad_k):  # type: ignore[no-untyped-def]
    cos, sin, *cu_seqlens = ctx.saved_tensors
    *layout, inverse = ctx.flags
    dtype = torch.promote_types(*ctx.dtypes)
    d_q, d_k = rope_qk(grad_q, grad_k, cos, sin, *layout, not inverse, dtype, *cu_seqlens)
    return d_q.to(ctx.dtypes[0]), d_k.to(ctx.dtypes[1]), *(None,) * 9


rope_qk.register_autograd(_backward, setup_context=_setup_context)

declare({"megacpp::rope_qk": OpTraits(kernel="in place", block_kind="ablock")})
