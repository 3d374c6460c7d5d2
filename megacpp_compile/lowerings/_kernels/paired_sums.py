"""Sums as pairs of floats, in the place of float64, which a TPU has to emulate.

A pair's members add up to the sum, the second being what the first has no digits for (Knuth's exact sum of two). A
difference of two pairs is then as good as a sum over just what lies between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scanned(sums: Tensor, rest: Tensor) -> Tensor:
    """[2, ..., n]: sums over all up to each position of the last dimension, in as many rounds as n has bits."""
    n, step = sums.shape[-1], 1
    while step < n:
        before, its_rest = (F.pad(t, (step, 0))[..., :n] for t in (sums, rest))
        total = sums + before
        part = total - sums
        rest = rest + its_rest + ((sums - (total - part)) + (before - part))
        sums, step = total, 2 * step
    return torch.stack((sums, rest))
