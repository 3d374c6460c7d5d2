"""The rotation that all RoPE ops share: pairs of channels rotated by an angle, as two multiply-adds.

Layouts. A head of `r` rotated channels holds `r/2` pairs. *half*: pair `i` sits in channels `(i, i + r/2)`;
*interleaved*: in channels `(2i, 2i+1)`. Input and output may differ: DeepSeek-V3's weights give interleaved pairs,
models write halves.

Tables are `r/2` wide (one angle a pair) or `r` wide (one entry for every *output* channel).
Source: RoFormer, https://arxiv.org/abs/2104.09864, eq. 34.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import ends_until


def _unpair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _pair(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def _table(table: Tensor, rope_dim: int, interleaved_out: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    table = table.to(dtype)
    return _unpair(table, interleaved_out) if table.shape[-1] == rope_dim else (table, table)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved_in: bool,
    interleaved_out: bool,
    inverse: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Rotate the last dimension of `x`; `inverse` applies the transpose, which is the gradient of the rotation.

    x: [..., r]; cos, sin: broadcastable to x's leading dimensions, last dimension r or r/2; the result has `dtype`.
    Computed in the operands' common dtype. In a compiled graph half precision is float32 inside a fused kernel, and
    without casts in between nothing is rounded that plain code would not round; called by itself on half precision,
    pass float32 operands (the ops do).
    """
    r = x.shape[-1]
    compute = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.promote_types(cos.dtype, sin.dtype))
    cos1, cos2 = _table(cos, r, interleaved_out, compute)
    sin1, sin2 = _table(sin, r, interleaved_out, compute)
    if inverse:
        g1, g2 = _unpair(x.to(compute), interleaved_out)
        first, second, pairs = g1 * cos1 + g2 * sin2, g2 * cos2 - g1 * sin1, interleaved_in
    else:
        x1, x2 = _unpair(x.to(compute), interleaved_in)
        first, second, pairs = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, interleaved_out
    return _pair(first.to(dtype), second.to(dtype), pairs)


def by_sequence(table: Tensor, cu_seqlens: Tensor | None, tokens: int) -> Tensor:
    """A table by position as one by packed token: token t of sequence i stands at `t - cu_seqlens[i]`.

    table: [positions, 1, r]; cu_seqlens: [sequences + 1], ascending, as FlashAttention and Megatron pack sequences; the
    result is [tokens, 1, r]. Tokens behind the last boundary count on from it, at most to the table's end; boundaries
    begin at 0, and what would come before them stands at position 0.
    """
    if cu_seqlens is None:
        return table
    token = torch.arange(tokens, device=table.device, dtype=cu_seqlens.dtype)
    start = cu_seqlens[ends_until(cu_seqlens, token) - 1]
    return table[(token - start).clamp(0, table.shape[0] - 1)]


def split_head(x: Tensor, nope_dim: int, rope_first: bool) -> tuple[Tensor, Tensor]:
    """A head's (unrotated, rotated) channels."""
    if rope_first:
        return x[..., x.shape[-1] - nope_dim :], x[..., : x.shape[-1] - nope_dim]
    return x[..., :nope_dim], x[..., nope_dim:]


def join_head(nope: Tensor, rope: Tensor, rope_first: bool) -> Tensor:
    """Inverse of `split_head`; an empty unrotated part joins to the rotated part alone."""
    if not nope.shape[-1]:
        return rope
    return torch.cat((rope, nope) if rope_first else (nope, rope), -1)


def rotate_head(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    rope_first: bool,
    inverse: bool,
    dtype: torch.dtype,
    turn: Callable[..., Tensor] = rotate,
) -> Tensor:
    """Rotate a head's rope channels with `turn` and pass the others through. Shapes as in `rotate` and `split_head`."""
    nope, rope = split_head(x, nope_dim, rope_first)
    rotated = turn(
        rope, cos, sin, interleaved_in=interleaved_in, interleaved_out=interleaved_out, inverse=inverse, dtype=dtype
    )
    return join_head(nope.to(dtype), rotated, rope_first)
