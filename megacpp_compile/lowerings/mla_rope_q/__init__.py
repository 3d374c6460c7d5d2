"""`megacpp::mla_rope_q`: rotate the rope slice of every query head.

    q          [..., nope_dim + r]  any leading dimensions, any strides
    cos, sin   as many dimensions as q, each leading one 1 or q's; last one r or r/2 (see `rotation`)
    cu_seqlens [sequences + 1] or None: q is packed, [tokens, heads, channels], and the tables [positions, 1, ...] are
               read by the token's position in its own sequence (`rotation.by_sequence`)
    returns    as q, in `out_dtype`, contiguous

`rope_first` puts the rotated channels before the others. `inverse` applies the transposed rotation: the op is its own
backward. Saved for backward: the tables alone.
Upstream: Megatron-Core `fused_mla_yarn_rope_apply.py`, DeepSeek-V3 `modeling_deepseek_v3.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.lowerings._op import define_op, wide
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.mla_rope_q import reference


def _outside(q: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> Tensor:
    return reference.mla_rope_q(*wide(q, cos, sin), *others).contiguous()


@define_op(reference.mla_rope_q, outside=_outside)
def mla_rope_q(  # type: ignore[no-untyped-def]
    q, cos, sin, nope_dim, interleaved_in, interleaved_out, rope_first, inverse, out_dtype, cu_seqlens=None
):
    return q.new_empty(q.shape, dtype=out_dtype)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, cos, sin, *flags, _, cu_seqlens = inputs
    ctx.save_for_backward(cos, sin, *([] if cu_seqlens is None else [cu_seqlens]))
    ctx.flags, ctx.dtype = flags, q.dtype


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    cos, sin, *cu_seqlens = ctx.saved_tensors
    *layout, inverse = ctx.flags
    return mla_rope_q(grad, cos, sin, *layout, not inverse, ctx.dtype, *cu_seqlens), *(None,) * 9


mla_rope_q.register_autograd(_backward, setup_context=_setup_context)

declare({"megacpp::mla_rope_q": OpTraits(kernel="in place", block_kind="ablock", up_projection="q")})
