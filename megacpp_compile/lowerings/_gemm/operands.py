"""Operands to try a GEMM on, as those that a graph has lie in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Operand(NamedTuple):
    """How a tensor lies in memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, t: Tensor) -> Operand:
        return cls(t.shape, t.stride(), t.dtype, t.device)

    def filled(self) -> Tensor:
        """Random numbers in this memory layout, from a generator of their own."""
        source = torch.Generator(self.device).manual_seed(0)
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.normal_(generator=source)
