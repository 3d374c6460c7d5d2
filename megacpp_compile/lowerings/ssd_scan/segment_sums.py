"""Sums of consecutive elements, all of them at once, and the adjoint of that.

The logarithm of the decay from position s to l is `a[s+1] + ... + a[l]`. As a difference of prefix sums it loses what
the prefix holds beyond it; a masked cumsum is exact, but Inductor can't compile one at the sizes of a model, and a
product with a triangle of ones runs in TF32 where the user allows that. So positions come in blocks: end of the first
block + whole blocks between + beginning of the last, and prefix sums are subtracted only within a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16


def segment_sums(a: Tensor) -> Tensor:
    """`out[..., l, s] = a[..., s+1] + ... + a[..., l]` for s <= l, -inf elsewhere; a: [..., n] -> [..., n, n].

    n: a multiple of 16 (`pad` makes it one).
    """
    rows = a.unflatten(-1, (-1, BLOCK))
    k = torch.arange(BLOCK, device=a.device)
    zero = a.new_zeros(())
    prefix = torch.where(k[:, None] >= k, rows.unsqueeze(-2), zero).sum(-1)  # [..., block, l]: up to l
    suffix = torch.where(k[:, None] < k, rows.unsqueeze(-2), zero).sum(-1)  # [..., block, s]: behind s
    i = torch.arange(rows.shape[-2], device=a.device)
    whole = torch.where(_between(i), prefix[..., -1][..., None, None, :], zero).sum(-1)  # [..., last, first]
    # [..., last block, l, first block, s]
    apart = prefix[..., None, None] + whole[..., :, None, :, None] + suffix[..., None, None, :, :]
    within = prefix[..., None, None] - prefix[..., None, None, :, :]
    later, same = (i[:, None] > i)[:, None, :, None], (i[:, None] == i)[:, None, :, None]
    lower = (k[:, None] >= k)[:, None, :]
    sums = torch.where(later, apart, torch.where(same & lower, within, a.new_full((), -torch.inf)))
    return sums.flatten(-2).flatten(-3, -2)


def segment_sums_adjoint(d: Tensor) -> Tensor:
    """The gradient of `a` for the gradient `d` [..., n, n] of `segment_sums(a)`; d is zero where s > l."""
    n = d.shape[-1]
    d = d.tril(-1)  # an empty sum has no gradient; left to cancel, it would leave rounding behind
    d = d.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., last block, l, first block, s]
    k = torch.arange(BLOCK, device=d.device)
    i = torch.arange(n // BLOCK, device=d.device)
    zero = d.new_zeros(())
    same = (i[:, None] == i)[:, None, :, None]
    within, apart = torch.where(same, d, zero), torch.where(same, zero, d)
    d_prefix = d.sum((-2, -1)) - within.sum((-4, -3))
    d_suffix = apart.sum((-4, -3))
    d_whole = apart.sum((-3, -1))
    da = torch.where(k[:, None] <= k, d_prefix.unsqueeze(-2), zero).sum(-1)
    da = da + torch.where(k[:, None] > k, d_suffix.unsqueeze(-2), zero).sum(-1)
    return (da + torch.where(_between(i), d_whole.unsqueeze(-1), zero).sum((-3, -2)).unsqueeze(-1)).flatten(-2)


def pad(a: Tensor) -> Tensor:
    """`a` with zeros behind it, its last dimension a multiple of 16."""
    return F.pad(a, (0, -a.shape[-1] % BLOCK))


def _between(i: Tensor) -> Tensor:
    """[last, first, block]: whether a block lies strictly between the first and the last."""
    return (i[:, None, None] > i) & (i[:, None] < i)
