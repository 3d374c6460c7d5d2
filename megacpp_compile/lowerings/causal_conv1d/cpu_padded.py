"""`causal_conv1d` on a CPU: the reference, with padded operands in memory.

As part of what reads them, padding is a mask around each of the loads, which then are not vectors.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megacpp_compile.lowerings.causal_conv1d import reference
from megacpp_compile.lowerings.causal_conv1d.layout import channels_adjacent


def _in_memory(x: Tensor, front: int, behind: int) -> Tensor:
    """`reference.with_zeros`, laid out as x: channels adjacent, or time."""
    b, t, c = x.shape
    steps = t + front + behind
    zeros = x.new_zeros(b, steps, c) if channels_adjacent(x) else x.new_zeros(b, c, steps).transpose(1, 2)
    return torch.slice_scatter(zeros, x, 1, front, front + t)


causal_conv1d = functools.partial(reference.causal_conv1d, pad=_in_memory)
causal_conv1d_backward = functools.partial(reference.causal_conv1d_backward, pad=_in_memory)
