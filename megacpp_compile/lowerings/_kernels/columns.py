"""Columns of a joined tensor, where kernels write what `cat` would copy there."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import Kernel, power_of_2

# Columns that one program copies.
MOST = 256


@dataclasses.dataclass(frozen=True)
class Columns:
    """Where a result goes: `width`, the channels of the joined tensor, of which the result's begin at `first`. Its rows
    are the result's tokens. whole: the joined tensor, contiguous; None where this result is the first to be written."""

    whole: Tensor | None
    first: int
    width: int

    def of(self, *tokens: Any, like: Tensor) -> Tensor:
        """The joined tensor; a new one has these dimensions before its channels."""
        if self.whole is not None:
            return self.whole
        return torch.empty((*tokens, self.width), dtype=like.dtype, device=like.device)


@triton.jit
def copy_columns(piece, whole, rows, width, first, joined, BR: tl.constexpr, BC: tl.constexpr):
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    there = (r < rows) & (c < width)
    tl.store(whole + r * joined + first + c, tl.load(piece + r * width + c, mask=there), mask=there)


_copy = Kernel(copy_columns, [{"BR": br, "num_warps": 4} for br in (8, 32)], key=("width", "rows"))


def copy(whole: Tensor, piece: Tensor, first: int) -> Tensor:
    """Copies `piece` [..., width] to the columns of `whole` [..., joined] that begin at `first`. Returns `whole`."""
    piece, width = piece.contiguous(), piece.shape[-1]
    rows, lanes = piece.numel() // width, min(power_of_2(width), MOST)
    _copy(
        lambda meta: (triton.cdiv(rows, meta["BR"]), triton.cdiv(width, lanes)), {"BR": 2048 // lanes, "num_warps": 4},
        piece=piece, whole=whole, rows=rows, width=width, first=first, joined=whole.shape[-1], BC=lanes,
    )  # fmt: skip
    return whole
