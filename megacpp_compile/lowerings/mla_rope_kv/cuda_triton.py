"""`mla_rope_kv` on CUDA: K written once from the latent's up-projection and the shared key row; V stays a view.

Forward moves the nope channels twice and writes the rope channels: `(2 * nope_dim + r)` a head. Backward takes the
gradients of K and V into one buffer and sums the key row's gradient over the heads in registers, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.rope_launch import CHOICES, KEY, MIN_BYTES, angle_arguments, blocks, unsupported
from megacpp_compile.lowerings._kernels.rows import rows_of
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, power_of_2
from megacpp_compile.lowerings._kernels.triton_rope import (
    angles,
    copy_rows,
    heads_of,
    load_pairs,
    position_in_sequence,
    store_pairs,
    tokens_of,
    turn,
)

__all__ = ["MIN_BYTES", "mla_rope_kv", "mla_rope_kv_backward", "supports"]


@triton.jit
def mla_rope_kv_rows(kv, row, k, cos, sin, cu_seqlens, tokens, n1, heads, xa, xb, xh, ra, rb, ya, yb, yh,
                     ca, cb, cl, sa, sb, sl, sequences, positions,
                     NOPE: tl.constexpr, NOPE_LANES: tl.constexpr, ROPE_FIRST: tl.constexpr,
                     HALF: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr, LOAD_INTERLEAVED: tl.constexpr,
                     STORE_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
                     WIDE: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
                     BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    ROPE_AT: tl.constexpr = 0 if ROPE_FIRST else NOPE
    NOPE_AT: tl.constexpr = 2 * HALF if ROPE_FIRST else 0
    t, a, b, ok = tokens_of(tl.program_id(0), tokens, n1, BT)
    h, exists = heads_of(tl.program_id(1), heads, BH)
    rows = ok[:, None] & exists[None, :]
    if PACKED:
        position = position_in_sequence(t, ok, cu_seqlens, sequences, positions, STEPS)
        at_cos, at_sin = position * cb, position * sb
    else:
        at_cos, at_sin = a * ca + b * cb, a * sa + b * sb
    c1, c2 = angles(cos, at_cos, cl, ok, FULL, TABLE_INTERLEAVED, HALF, LANES, WIDE)
    s1, s2 = angles(sin, at_sin, sl, ok, FULL, TABLE_INTERLEAVED, HALF, LANES, WIDE)
    shared = row + (a * ra + b * rb)[:, None]
    x1, x2 = load_pairs(shared, ok[:, None], LOAD_INTERLEAVED, HALF, LANES, WIDE, BT, 1)
    y1, y2 = turn(x1, x2, c1, c2, s1, s2, INVERSE)
    x = kv + (a * xa + b * xb)[:, None] + (h * xh)[None, :]
    y = k + (a * ya + b * yb)[:, None] + (h * yh)[None, :]
    if NOPE > 0:
        copy_rows(x, y + NOPE_AT, rows, NOPE, NOPE_LANES)
    store_pairs(y + ROPE_AT, rows, y1, y2, STORE_INTERLEAVED, HALF, LANES, BT, BH)


@triton.jit
def mla_rope_kv_gradients(grad_k, grad_v, d_kv, d_row, cos, sin, cu_seqlens, tokens, n1, heads,
                          xa, xb, xh, va, vb, vh, ya, yb, yh, ra, rb, ca, cb, cl, sa, sb, sl, sequences, positions,
                          NOPE: tl.constexpr, NOPE_LANES: tl.constexpr, ROPE_FIRST: tl.constexpr,
                          V: tl.constexpr, V_LANES: tl.constexpr,
                          HALF: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr,
                          LOAD_INTERLEAVED: tl.constexpr, STORE_INTERLEAVED: tl.constexpr,
                          TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
                          WIDE: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
                          BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    ROPE_AT: tl.constexpr = 0 if ROPE_FIRST else NOPE
    NOPE_AT: tl.constexpr = 2 * HALF if ROPE_FIRST else 0
    t, a, b, ok = tokens_of(tl.program_id(0), tokens, n1, BT)
    if PACKED:
        position = position_in_sequence(t, ok, cu_seqlens, sequences, positions, STEPS)
        at_cos, at_sin = position * cb, position * sb
    else:
        at_cos, at_sin = a * ca + b * cb, a * sa + b * sb
    if WIDE:
        g1 = tl.zeros([BT, LANES], tl.float64)
    else:
        g1 = tl.zeros([BT, LANES], tl.float32)
    g2 = g1
    for first in range(0, heads, BH):
        h = (first + tl.arange(0, BH)).to(tl.int64)
        rows = ok[:, None] & (h < heads)[None, :]
        x = grad_k + (a * xa + b * xb)[:, None] + (h * xh)[None, :]
        v = grad_v + (a * va + b * vb)[:, None] + (h * vh)[None, :]
        y = d_kv + (a * ya + b * yb)[:, None] + (h * yh)[None, :]
        x1, x2 = load_pairs(x + ROPE_AT, rows, LOAD_INTERLEAVED, HALF, LANES, WIDE, BT, BH)
        g1 += tl.sum(x1, 1)
        g2 += tl.sum(x2, 1)
        if NOPE > 0:
            copy_rows(x + NOPE_AT, y, rows, NOPE, NOPE_LANES)
        if V > 0:
            copy_rows(v, y + NOPE, rows, V, V_LANES)
    c1, c2 = angles(cos, at_cos, cl, ok, FULL, TABLE_INTERLEAVED, HALF, LANES, WIDE)
    s1, s2 = angles(sin, at_sin, sl, ok, FULL, TABLE_INTERLEAVED, HALF, LANES, WIDE)
    y1, y2 = turn(g1[:, None, :], g2[:, None, :], c1, c2, s1, s2, INVERSE)
    out = d_row + (a * ra + b * rb)[:, None]
    store_pairs(out, ok[:, None], y1, y2, STORE_INTERLEAVED, HALF, LANES, BT, 1)


_forward = Kernel(mla_rope_kv_rows, CHOICES, KEY)
_backward = Kernel(mla_rope_kv_gradients, CHOICES, KEY)


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if name == "mla_rope_kv":
        kv, row, cos, sin, nope_dim = args[:5]
        rows = rows_of([kv, kv.new_empty(kv.shape)], [row, cos, sin], packed=_given(args, 9))
        return rows if isinstance(rows, str) else unsupported(cos, sin, row.shape[-1], nope_dim)
    grad_k, grad_v, cos, sin, nope_dim = args[:5]
    if sum(not (isinstance(grad_k.shape[i], int) and grad_k.shape[i] == 1) for i in args[8]) > 1:
        return "the key row is shared by more than the heads"
    row = grad_k.new_empty(_shared_shape(grad_k, args[8], 1))
    rows = rows_of([grad_k, grad_v, grad_k.new_empty(grad_k.shape)], [row, cos, sin], packed=_given(args, 11))
    return rows if isinstance(rows, str) else unsupported(cos, sin, grad_k.shape[-1] - nope_dim, nope_dim)


def _given(args: Sequence[Any], index: int) -> bool:
    return len(args) > index and args[index] is not None


def _shared_shape(grad_k: Tensor, shared_dims: Sequence[int], width: int) -> list[Any]:
    return [*(1 if i in shared_dims else n for i, n in enumerate(grad_k.shape[:-1])), width]


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
) -> tuple[Tensor, Tensor]:
    rope_dim = k_rope.shape[-1]
    k = torch.empty((*kv.shape[:-1], nope_dim + rope_dim), dtype=out_dtype, device=kv.device)
    v = kv[..., nope_dim:]
    rows = rows_of([kv, k], [k_rope, cos, sin], packed=cu_seqlens is not None)
    assert not isinstance(rows, str), rows
    if rows.empty:
        return k, v
    (xa, xb, xh), (ya, yb, yh), (ra, rb, _), *_ = rows.strides
    args = angle_arguments(
        cos, sin, rows, rope_dim, interleaved_in, interleaved_out, False, cu_seqlens, kv.dtype, k_rope.dtype, out_dtype
    )
    _forward(
        lambda meta: (triton.cdiv(rows.tokens, meta["BT"]), triton.cdiv(rows.heads, meta["BH"])),
        blocks(rows, "keys"), kv=kv, row=k_rope, k=k, heads=rows.heads, xa=xa, xb=xb, xh=xh, ra=ra, rb=rb,
        ya=ya, yb=yb, yh=yh,
        NOPE=nope_dim, NOPE_LANES=power_of_2(nope_dim), ROPE_FIRST=int(rope_first), **args,
    )  # fmt: skip
    return k, v


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
) -> tuple[Tensor, Tensor]:
    rope_dim, v_dim = grad_k.shape[-1] - nope_dim, grad_v.shape[-1]
    d_kv = torch.empty((*grad_k.shape[:-1], nope_dim + v_dim), dtype=kv_dtype, device=grad_k.device)
    d_row = torch.empty(_shared_shape(grad_k, shared_dims, rope_dim), dtype=rope_dtype, device=grad_k.device)
    rows = rows_of([grad_k, grad_v, d_kv], [d_row, cos, sin], packed=cu_seqlens is not None)
    assert not isinstance(rows, str), rows
    if rows.empty:
        return d_kv, d_row.zero_()
    (xa, xb, xh), (va, vb, vh), (ya, yb, yh), (ra, rb, _), *_ = rows.strides
    args = angle_arguments(
        cos, sin, rows, rope_dim, interleaved_in, interleaved_out, True, cu_seqlens, grad_k.dtype, kv_dtype, rope_dtype
    )
    _backward(
        lambda meta: (triton.cdiv(rows.tokens, meta["BT"]),),
        blocks(rows, "key gradients"), grad_k=grad_k, grad_v=grad_v, d_kv=d_kv, d_row=d_row, heads=rows.heads,
        xa=xa, xb=xb, xh=xh, va=va, vb=vb, vh=vh, ya=ya, yb=yb, yh=yh, ra=ra, rb=rb,
        NOPE=nope_dim, NOPE_LANES=power_of_2(nope_dim), ROPE_FIRST=int(rope_first),
        V=v_dim, V_LANES=power_of_2(v_dim), **args,
    )  # fmt: skip
    return d_kv, d_row
