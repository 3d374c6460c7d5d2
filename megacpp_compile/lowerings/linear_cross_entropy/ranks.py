"""Rows of which each rank of a group has the logits of some words: their statistics, of all words."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile._torch.ops import assert_async, collectives


def statistics_of_words(z: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, the logit of the word `at`, the sum of logits) of each row of z [n, words of this rank]; `at` is
    none of them where another rank has it, and its logit 0 here."""
    inside = (at >= 0) & (at < z.shape[1])
    picked = z.gather(1, torch.where(inside, at, 0).unsqueeze(1)).squeeze(1)
    return torch.logsumexp(z, -1), torch.where(inside, picked, 0), z.sum(-1)


def joined(lse: Tensor, picked: Tensor, total: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of all words from those of each rank's, [n] each: the same on every rank, bit for bit."""
    top = _over_ranks(lse, "max", group)
    base = torch.where(top == float("-inf"), 0, top)  # nothing but -inf so far
    sums, picked, total = _over_ranks(torch.stack([torch.exp(lse - base), picked, total]), "sum", group)
    return base + torch.log(sums), picked, total


def in_bounds(at: Tensor, words: int) -> None:
    """Fail, on the device, for a word that no rank has."""
    assert_async(((at >= 0) & (at < words)).all(), "linear_cross_entropy: a target is out of bounds")


def _over_ranks(t: Tensor, how: str, group: str) -> Tensor:
    result: Tensor = collectives.wait_tensor(collectives.all_reduce(t, how, group))
    return result
