"""`ssd_scan` on XLA: the reference, with sums of logarithms as pairs of floats in the place of float64, which a TPU has
to emulate.

A pair's members add up to the sum, the second being what the first has no digits for (Knuth's exact sum of two). A
difference of two pairs is then as good as a sum over just what lies between. Their gradients are sums over parts of a
chunk, taken so that what cancels exactly never goes in: the diagonal, and what leaves the chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings.ssd_scan import reference


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why this cannot serve the call, or None."""
    x = next(a for a in args if isinstance(a, Tensor))
    return None if isinstance(x.shape[1], int) else "a number of tokens that is not fixed"


def _scanned(sums: Tensor, rest: Tensor) -> Tensor:
    """[2, ..., n]: sums over all up to each position of the last dimension, in as many rounds as n has bits."""
    n, step = sums.shape[-1], 1
    while step < n:
        before, its_rest = (F.pad(t, (step, 0))[..., :n] for t in (sums, rest))
        total = sums + before
        part = total - sums
        rest = rest + its_rest + ((sums - (total - part)) + (before - part))
        sums, step = total, 2 * step
    return torch.stack((sums, rest))


class PairedSums(reference.Float64Sums):
    """As its base, with a dimension of two in front of the sums."""

    @staticmethod
    def prefix(a: Tensor) -> Tensor:
        return _scanned(a, torch.zeros_like(a))

    @staticmethod
    def cumulate(sums: Tensor) -> Tensor:
        return _scanned(sums[0], sums[1])

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
