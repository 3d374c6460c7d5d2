"""`rope_qk` on CUDA: queries and keys in one launch, each program a token's block of heads sharing its angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.fx.edit import same_size
from megacpp_compile.lowerings._kernels.rope_launch import CHOICES, KEY, MIN_BYTES, angle_arguments, blocks, unsupported
from megacpp_compile.lowerings._kernels.rows import RowLayout, overlaps, rows_of
from megacpp_compile.lowerings._kernels.triton_launch import Kernel, power_of_2
from megacpp_compile.lowerings._kernels.triton_rope import turn_heads

__all__ = ["MIN_BYTES", "OVERWRITES", "rope_qk", "supports"]


@triton.jit
def rope_qk_rows(q, k, q_out, k_out, cos, sin, cu_seqlens, tokens, n1, heads, k_heads,
                 xa, xb, xh, ya, yb, yh, ka, kb, kh, la, lb, lh, ca, cb, cl, sa, sb, sl, sequences, positions,
                 NOPE: tl.constexpr, NOPE_LANES: tl.constexpr, ROPE_FIRST: tl.constexpr,
                 HALF: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr, LOAD_INTERLEAVED: tl.constexpr,
                 STORE_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
                 WIDE: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
                 BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    block = tl.program_id(1)
    q_blocks = tl.cdiv(heads, BH)
    if block < q_blocks:
        turn_heads(q, q_out, tl.program_id(0), block, tokens, n1, heads, xa, xb, xh, ya, yb, yh,
                   cos, sin, ca, cb, cl, sa, sb, sl, cu_seqlens, sequences, positions, NOPE, NOPE_LANES, ROPE_FIRST,
                   HALF, LANES, FULL, LOAD_INTERLEAVED, STORE_INTERLEAVED, TABLE_INTERLEAVED, INVERSE, WIDE, False,
                   PACKED, STEPS, BT, BH)  # fmt: skip
    else:
        turn_heads(k, k_out, tl.program_id(0), block - q_blocks, tokens, n1, k_heads, ka, kb, kh, la, lb, lh,
                   cos, sin, ca, cb, cl, sa, sb, sl, cu_seqlens, sequences, positions, NOPE, NOPE_LANES, ROPE_FIRST,
                   HALF, LANES, FULL, LOAD_INTERLEAVED, STORE_INTERLEAVED, TABLE_INTERLEAVED, INVERSE, WIDE, False,
                   PACKED, STEPS, BT, BH)  # fmt: skip


@triton.jit
def rope_qk_in_place(q, k, cos, sin, cu_seqlens, tokens, n1, heads, k_heads, xa, xb, xh, ka, kb, kh,
                     ca, cb, cl, sa, sb, sl, sequences, positions,
                     NOPE: tl.constexpr, NOPE_LANES: tl.constexpr, ROPE_FIRST: tl.constexpr,
                     HALF: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr, LOAD_INTERLEAVED: tl.constexpr,
                     STORE_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
                     WIDE: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
                     BT: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    block = tl.program_id(1)
    q_blocks = tl.cdiv(heads, BH)
    if block < q_blocks:
        turn_heads(q, q, tl.program_id(0), block, tokens, n1, heads, xa, xb, xh, xa, xb, xh,
                   cos, sin, ca, cb, cl, sa, sb, sl, cu_seqlens, sequences, positions, NOPE, NOPE_LANES, ROPE_FIRST,
                   HALF, LANES, FULL, LOAD_INTERLEAVED, STORE_INTERLEAVED, TABLE_INTERLEAVED, INVERSE, WIDE, True,
                   PACKED, STEPS, BT, BH)  # fmt: skip
    else:
        turn_heads(k, k, tl.program_id(0), block - q_blocks, tokens, n1, k_heads, ka, kb, kh, ka, kb, kh,
                   cos, sin, ca, cb, cl, sa, sb, sl, cu_seqlens, sequences, positions, NOPE, NOPE_LANES, ROPE_FIRST,
                   HALF, LANES, FULL, LOAD_INTERLEAVED, STORE_INTERLEAVED, TABLE_INTERLEAVED, INVERSE, WIDE, True,
                   PACKED, STEPS, BT, BH)  # fmt: skip


_copying = Kernel(rope_qk_rows, CHOICES, (*KEY, "k_heads"))
_in_place = Kernel(rope_qk_in_place, CHOICES, (*KEY, "k_heads"), restore=("q", "k"))

OVERWRITES = {"rope_qk": (0, 1)}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    q, k, cos, sin, nope_dim = args[:5]
    rows = _rows(q, k, q.new_empty(q.shape), k.new_empty(k.shape), cos, sin, _packed(args))
    return rows if isinstance(rows, str) else unsupported(cos, sin, q.shape[-1] - nope_dim, nope_dim)


def loses(name: str, args: Sequence[Any]) -> str | None:
    """Why Inductor's own fusion is as fast, or None: where all channels rotate, in halves, in place saves nothing.

    Packed, it would search the boundaries once for every channel that it turns.
    """
    nope_dim, interleaved_in, interleaved_out = args[4:7]
    plain = nope_dim == 0 and not interleaved_in and not interleaved_out and not _packed(args)
    return "inductor-is-faster: full heads in halves" if plain else None


def _packed(args: Sequence[Any]) -> bool:
    return len(args) > 10 and args[10] is not None


def _rows(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, packed: bool = False
) -> RowLayout | str:
    """One walk over the tokens for all four; or why there is none."""
    if q.dim() != k.dim():
        return "operands differ in rank"
    differ = [i for i, (n, m) in enumerate(zip(q.shape[:-1], k.shape[:-1], strict=True)) if not same_size(n, m)]
    if len(differ) > 1 or any(t.shape[i] != 1 for t in (cos, sin) for i in differ):
        return "queries and keys differ in more than their heads"
    if packed and differ == [0]:
        return "packed queries and keys differ in their tokens"
    return rows_of([q, q_out, k, k_out], [cos, sin], packed, head=differ[0] if differ else None)


def rope_qk(
    q: Tensor,
    k: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """The op; with `in_place` the results are q and k, overwritten, where their dtypes are the results'."""
    in_place = in_place and all(t.dtype == out_dtype and not overlaps(t) for t in (q, k))
    outs = [t if in_place else torch.empty(t.shape, dtype=out_dtype, device=t.device) for t in (q, k)]
    rows = _rows(q, k, outs[0], outs[1], cos, sin, cu_seqlens is not None)
    assert not isinstance(rows, str), rows
    k_heads = 1 if rows.head is None else k.shape[rows.head]
    if statically_known_true(rows.tokens == 0) or rows.empty and statically_known_true(k_heads == 0):
        return outs[0], outs[1]
    (xa, xb, xh), (ya, yb, yh), (ka, kb, kh), (la, lb, lh), *_ = rows.strides
    args = angle_arguments(
        cos, sin, rows, q.shape[-1] - nope_dim, interleaved_in, interleaved_out, inverse, cu_seqlens,
        q.dtype, k.dtype, out_dtype,
    )  # fmt: skip
    args |= {"q": q, "k": k, "heads": rows.heads, "k_heads": k_heads, "xa": xa, "xb": xb, "xh": xh, "ka": ka,
             "kb": kb, "kh": kh, "NOPE": nope_dim, "NOPE_LANES": power_of_2(nope_dim),
             "ROPE_FIRST": int(rope_first)}  # fmt: skip

    def grid(meta: dict[str, Any]) -> tuple[Any, ...]:
        bh = meta["BH"]
        return triton.cdiv(rows.tokens, meta["BT"]), triton.cdiv(rows.heads, bh) + triton.cdiv(k_heads, bh)

    if in_place:
        _in_place(grid, blocks(rows, "turn"), **args)
    else:
        _copying(
            grid, blocks(rows, "copy"), q_out=outs[0], k_out=outs[1], ya=ya, yb=yb, yh=yh, la=la, lb=lb, lh=lh, **args
        )
    return outs[0], outs[1]
