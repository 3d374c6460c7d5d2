"""`mla_rope_q` on CUDA: one Triton kernel, which touches only the rope channels where it may work in q's own memory.

Bytes moved per head, in place: r channels read and r written; out of place all `nope_dim + r` channels, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.rope_launch import CHOICES, KEY, MIN_BYTES, angle_arguments, blocks, unsupported
from megacpp_compile.lowerings._kernels.rows import overlaps, rows_of
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, power_of_2
from megacpp_compile.lowerings._kernels.triton_rope import turn_heads

__all__ = ["MIN_BYTES", "OVERWRITES", "mla_rope_q", "supports"]


@triton.jit
def mla_rope_q_rows(q, out, cos, sin, cu_seqlens, tokens, n1, heads, xa, xb, xh, ya, yb, yh,
                    ca, cb, cl, sa, sb, sl, sequences, positions,
                    NOPE: tl.constexpr, NOPE_LANES: tl.constexpr, ROPE_FIRST: tl.constexpr,
                    HALF: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr, LOAD_INTERLEAVED: tl.constexpr,
                    STORE_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
                    WIDE: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
                    BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    turn_heads(q, out, tl.program_id(0), tl.program_id(1), tokens, n1, heads, xa, xb, xh, ya, yb, yh,
               cos, sin, ca, cb, cl, sa, sb, sl, cu_seqlens, sequences, positions, NOPE, NOPE_LANES, ROPE_FIRST,
               HALF, LANES, FULL, LOAD_INTERLEAVED, STORE_INTERLEAVED, TABLE_INTERLEAVED, INVERSE, WIDE, False,
               PACKED, STEPS, BT, BH)  # fmt: skip


@triton.jit
def mla_rope_q_in_place(q, cos, sin, cu_seqlens, tokens, n1, heads, xa, xb, xh,
                        ca, cb, cl, sa, sb, sl, sequences, positions,
                        NOPE: tl.constexpr, NOPE_LANES: tl.constexpr, ROPE_FIRST: tl.constexpr,
                        HALF: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr, LOAD_INTERLEAVED: tl.constexpr,
                        STORE_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
                        WIDE: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
                        BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    turn_heads(q, q, tl.program_id(0), tl.program_id(1), tokens, n1, heads, xa, xb, xh, xa, xb, xh,
               cos, sin, ca, cb, cl, sa, sb, sl, cu_seqlens, sequences, positions, NOPE, NOPE_LANES, ROPE_FIRST,
               HALF, LANES, FULL, LOAD_INTERLEAVED, STORE_INTERLEAVED, TABLE_INTERLEAVED, INVERSE, WIDE, True,
               PACKED, STEPS, BT, BH)  # fmt: skip


_copying = Kernel(mla_rope_q_rows, CHOICES, KEY)
_in_place = Kernel(mla_rope_q_in_place, CHOICES, KEY, restore=("q",))

OVERWRITES = {"mla_rope_q": (0,)}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    q, cos, sin, nope_dim = args[:4]
    cu_seqlens = args[9] if len(args) > 9 else None
    rows = rows_of([q, q.new_empty(q.shape)], [cos, sin], packed=cu_seqlens is not None)
    return rows if isinstance(rows, str) else unsupported(cos, sin, q.shape[-1] - nope_dim, nope_dim)


def mla_rope_q(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    rope_first: bool,
    inverse: bool,
    out_dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """The op; with `in_place` the result is q itself, overwritten, where its dtype is the result's."""
    in_place = in_place and q.dtype == out_dtype and not overlaps(q)
    out = q if in_place else torch.empty(q.shape, dtype=out_dtype, device=q.device)
    rows = rows_of([q, out], [cos, sin], packed=cu_seqlens is not None)
    assert not isinstance(rows, str), rows
    if rows.empty:
        return out
    (xa, xb, xh), (ya, yb, yh), *_ = rows.strides
    args = angle_arguments(
        cos, sin, rows, q.shape[-1] - nope_dim, interleaved_in, interleaved_out, inverse, cu_seqlens, q.dtype, out_dtype
    )
    args |= {"q": q, "heads": rows.heads, "xa": xa, "xb": xb, "xh": xh, "NOPE": nope_dim,
             "NOPE_LANES": power_of_2(nope_dim), "ROPE_FIRST": int(rope_first)}  # fmt: skip

    def grid(meta: dict[str, Any]) -> tuple[Any, ...]:
        return triton.cdiv(rows.tokens, meta["BT"]), triton.cdiv(rows.heads, meta["BH"])

    if in_place:
        _in_place(grid, blocks(rows, "turn"), **args)
    else:
        _copying(grid, blocks(rows, "copy"), out=out, ya=ya, yb=yb, yh=yh, **args)
    return out
