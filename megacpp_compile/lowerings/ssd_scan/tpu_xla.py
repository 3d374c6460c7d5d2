"""`ssd_scan` on XLA: the reference, with sums of logarithms as pairs of floats (`_kernels.paired_sums`).

Their gradients are sums over parts of a chunk, taken so that what cancels exactly never goes in: the diagonal, and what
leaves the chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.paired_sums import scanned
from megacpp_compile.lowerings.ssd_scan import reference


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    x = next(a for a in args if isinstance(a, Tensor))
    return None if isinstance(x.shape[1], int) else "a number of tokens that is not fixed"


class PairedSums(reference.Float64Sums):
    """As its base, with a dimension of two in front of the sums."""

    @staticmethod
    def prefix(a: Tensor) -> Tensor:
        return scanned(a, torch.zeros_like(a))

    @staticmethod
    def cumulate(sums: Tensor) -> Tensor:
        return scanned(sums[0], sums[1])

    @staticmethod
    def to(sums: Tensor, dtype: torch.dtype) -> Tensor:
        return (sums[0] + sums[1]).to(dtype)

    @staticmethod
    def gradient(d_decay: Tensor, d_in: Tensor, d_out: Tensor, d_total: Tensor) -> Tensor:
        n = d_in.shape[-1]
        ones = torch.ones(n, n, dtype=d_in.dtype, device=d_in.device)
        within = torch.where(ones.tril(-1) > 0, d_decay, 0)
        from_here_on = (within.sum(-1) - within.sum(-2) + d_in) @ ones.tril()
        return from_here_on + d_out @ ones.triu(1) + d_total.unsqueeze(-1)


ssd_scan = functools.partial(reference.ssd_scan, sums=PairedSums)
ssd_scan_backward = functools.partial(reference.ssd_scan_backward, sums=PairedSums)
