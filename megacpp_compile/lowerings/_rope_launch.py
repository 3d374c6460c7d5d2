"""What every RoPE kernel is told about its tables and its heads, and the block sizes it starts from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._rows import Rows
from megacpp_compile.lowerings._triton_launch import is_wide, power_of_2

# Rope widths a kernel holds in registers; wider ones are left to the reference lowering.
MAX_ROPE_DIM = 512


# Bytes of the largest operand from which a kernel of its own gains on Inductor's fusion (H200).
MIN_BYTES = 32 << 20


def angle_arguments(
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    rope_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    inverse: bool,
    cu_seqlens: Tensor | None,
    *others: torch.dtype,
) -> dict[str, Any]:
    """The kernel arguments that describe the rotation. The last two strides of `rows` are those of cos and sin.

    The inverse reads what the forward wrote, so input and output layout change places; tables stay as they were.
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


def refused(cos: Tensor, sin: Tensor, rope_dim: Any, nope_dim: Any) -> str | None:
    """Why no kernel takes these tables and head sizes, or None."""
    if not isinstance(rope_dim, int) or not isinstance(nope_dim, int):
        return "head sizes are symbolic"
    if rope_dim > MAX_ROPE_DIM:
        return f"rope_dim {rope_dim} is beyond {MAX_ROPE_DIM}"
    if cos.shape[-1] != sin.shape[-1]:
        return "cos and sin differ in width"
    return None


def blocks(rows: Rows, most: int = 64, warps: int = 8, tokens: int | None = None) -> dict[str, int]:
    """Block sizes without measuring: `most` rows a program, taken along the dimension that is closer in memory.

    Measured on an H200: large blocks keep more reads in flight, and a program's heads share its angles. `tokens` caps
    how many a program takes when its heads are few, which then needs fewer warps.
    """
    heads = power_of_2(rows.heads) if isinstance(rows.heads, int) else 16
    if rows.heads_inside:
        bh = min(heads, most)
        bt = min(most // bh, tokens or most)
        return {"BT": bt, "BH": bh, "num_warps": max(1, min(warps, warps * bt * bh // (most // 2)))}
    return {"BT": most, "BH": 1, "num_warps": warps}


# What autotuning measures: from one token's heads to a strip of tokens of one head.
CHOICES = [
    {"BT": bt, "BH": bh, "num_warps": warps}
    for bt, bh in ((1, 16), (1, 32), (1, 64), (4, 16), (16, 4), (16, 1), (64, 1))
    for warps in (4, 8)
]
KEY = ("heads", "tokens")
