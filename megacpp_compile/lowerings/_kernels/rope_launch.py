"""The arguments of every RoPE kernel that describe tables and heads, and the block sizes it starts from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.rows import RowLayout
from megacpp_compile.lowerings._kernels.triton_launch import is_wide, power_of_2

# Rope widths a kernel holds in registers; wider ones are left to the reference lowering.
MAX_ROPE_DIM = 512


# Bytes of the largest operand from which a kernel of its own gains on Inductor's fusion (H200).
MIN_BYTES = 32 << 20


def angle_arguments(
    cos: Tensor,
    sin: Tensor,
    rows: RowLayout,
    rope_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    inverse: bool,
    cu_seqlens: Tensor | None,
    *others: torch.dtype,
) -> dict[str, Any]:
    """The kernel arguments that describe the rotation. The last two strides of `rows` are those of cos and sin.

    The inverse reads what the forward wrote, so input and output layouts swap; tables stay as they were.
    """
    (ca, cb, _), (sa, sb, _) = rows.strides[-2:]
    load, store = (interleaved_out, interleaved_in) if inverse else (interleaved_in, interleaved_out)
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # Steps of a binary search; of a symbolic number of sequences, which must get no guard, as many as any needs.
    steps = (sequences + 1).bit_length() if isinstance(sequences, int) else 31
    return {
        "cos": cos, "sin": sin, "cu_seqlens": cos if cu_seqlens is None else cu_seqlens.contiguous(),
        "tokens": rows.tokens, "n1": rows.n1, "ca": ca, "cb": cb, "cl": cos.stride(-1), "sa": sa, "sb": sb,
        "sl": sin.stride(-1), "sequences": sequences, "positions": cos.shape[0],
        "HALF": rope_dim // 2, "LANES": power_of_2(rope_dim // 2), "FULL": int(cos.shape[-1] == rope_dim),
        "LOAD_INTERLEAVED": int(load), "STORE_INTERLEAVED": int(store), "TABLE_INTERLEAVED": int(interleaved_out),
        "INVERSE": int(inverse), "WIDE": int(is_wide(cos.dtype, sin.dtype, *others)),
        "PACKED": int(cu_seqlens is not None),
        "STEPS": 0 if cu_seqlens is None else steps,
    }  # fmt: skip


def unsupported(cos: Tensor, sin: Tensor, rope_dim: Any, nope_dim: Any) -> str | None:
    """Why no kernel takes these tables and head sizes, or None."""
    if not isinstance(rope_dim, int) or not isinstance(nope_dim, int):
        return "head sizes are symbolic"
    if rope_dim > MAX_ROPE_DIM:
        return f"rope_dim {rope_dim} is beyond {MAX_ROPE_DIM}"
    if cos.shape[-1] != sin.shape[-1]:
        return "cos and sin differ in width"
    return None


# Block sizes without measuring: (tokens, heads, warps) by the number of heads, from many to few, and the choice where
# tokens lie closer in memory than a token's heads. Found on an H200, by sweeps at 1 to 128 heads of 128 + 64 channels:
# one token with as many heads as fit keeps most reads in flight, and the heads share their angles.
_INSIDE = {
    "turn": ((24, (1, 32, 4)), (17, (16, 1, 4)), (9, (1, 16, 4)), (0, (16, 4, 4))),
    "copy": ((64, (1, 64, 4)), (17, (1, 32, 4)), (9, (1, 16, 4)), (0, (16, 4, 4))),
    "keys": ((64, (1, 64, 8)), (17, (1, 32, 8)), (9, (1, 16, 4)), (0, (16, 4, 8))),
    "key gradients": ((64, (1, 64, 8)), (24, (1, 32, 4)), (9, (1, 16, 2)), (0, (8, 1, 4))),
}
# With the tokens inside, a strip of one head's tokens.
_OUTSIDE = {"turn": (2, 16, 4), "copy": (8, 1, 4), "keys": (8, 1, 4), "key gradients": (8, 1, 4)}
# From heads inside to tokens inside: part of a token's heads, so that neither side jumps with every row.
_REORDERED = {"copy": ((0, (1, 16, 8)),), "keys": ((17, (2, 32, 8)), (0, (1, 16, 8)))}


def blocks(rows: RowLayout, work: str) -> dict[str, int]:
    """The built-in block sizes for `work`: "turn" in place, "copy" out of place, "keys", "key gradients"."""
    heads = rows.heads if isinstance(rows.heads, int) else 32
    by_heads = _REORDERED[work] if work in _REORDERED and rows.reorders else _INSIDE[work]
    inside = next(sizes for least, sizes in by_heads if heads >= least)
    bt, bh, warps = inside if rows.heads_inside else _OUTSIDE[work]
    return {"BT": bt, "BH": bh, "num_warps": warps}


# What autotuning measures: from one token's heads to a strip of tokens of one head.
CHOICES = [
    {"BT": bt, "BH": bh, "num_warps": warps}
    for bt, bh in ((1, 16), (1, 32), (1, 64), (2, 32), (8, 1), (16, 4), (16, 1))
    for warps in (4, 8)
]
KEY = ("heads", "tokens")
