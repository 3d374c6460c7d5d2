"""Sizes of fake tensors in elements and bytes; a symbolic size counts as its hint."""

from __future__ import annotations

import math
from typing import Any

import torch


def elements(tensor: torch.Tensor) -> int:
    """The number of elements of a fake tensor."""
    return math.prod(hint(n) for n in tensor.shape)


def rows(tensor: torch.Tensor) -> float:
    """The number of rows, [..., k]: elements over the size of the last dimension."""
    return elements(tensor) / hint(tensor.shape[-1])


def nbytes(value: Any) -> int:
    """Bytes of a fake tensor, or of all tensors in a list or tuple; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return elements(value) * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def hint(size: object) -> int:
    """`size` of a fake tensor as an int: itself, or the hint of a symbolic one; 1 for one without a hint."""
    return size if isinstance(size, int) else int(size.node.hint or 1)  # type: ignore[attr-defined]
