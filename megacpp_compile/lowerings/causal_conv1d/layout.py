"""How `causal_conv1d`'s results lie in memory: as its operand does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def channels_adjacent(x: Tensor) -> bool:
    """Whether neighbouring channels of x [b, t, c] are neighbours in memory; if in doubt, yes."""
    return not statically_known_true(x.stride(1) == 1) or statically_known_true(x.stride(2) == 1)


def laid_out_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """New memory of x's shape, contiguous as [b, t, c], or as [b, c, t] where time is what is adjacent in x."""
    if channels_adjacent(x):
        return x.new_empty(x.shape, dtype=dtype)
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1]), dtype=dtype).transpose(1, 2)


def moved_to(y: Tensor, x: Tensor) -> Tensor:
    """y, laid out as `laid_out_as(x)` says."""
    if channels_adjacent(x):
        return y.contiguous()
    return y.transpose(1, 2).contiguous().transpose(1, 2)
