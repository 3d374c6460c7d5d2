"""A random matrix of signs as a function of its key: Philox4x32-10, in operations on int64 that every target has.

Philox maps a key of two words of 32 bits and a counter of four to four random words. Each word is in an int64 here, and
products are taken in halves, so that none leaves 63 bits, where targets would differ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_BITS, _WORDS = 32, 4
ENTRIES = _BITS * _WORDS  # that one counter makes

Words = tuple[Tensor | int, ...]


def magnitude(rank: int) -> float:
    """The power of two next to 1 / sqrt(rank): what the entries of `signs` are but for their sign."""
    return float(2.0 ** -round(math.log2(rank) / 2))


def signs(rows: int, rank: int, draw: Tensor | None, seed: int, like: Tensor) -> Tensor:
    """[rows, rank] of `magnitude(rank)` and its negative, in the dtype and on the device of `like`.

    Entry (i, j) is bit i * rank + j of the words that Philox makes with the key `seed` of the counters (0, 0, draw),
    (1, 0, draw), ...
    """
    size = rows * rank
    entry = torch.arange(-(-size // ENTRIES), device=like.device)
    drawn: Words = (0, 0) if draw is None else (draw & WORD, (draw >> 32) & WORD)
    words = torch.stack(philox((entry & WORD, entry >> 32, *drawn), (seed & WORD, seed >> 32)), -1)
    bits = (words[..., None] >> torch.arange(_BITS, device=like.device)) & 1
    return ((1 - 2 * bits).to(like.dtype) * magnitude(rank)).flatten()[:size].view(rows, rank)


def philox(counter: Words, key: tuple[int, int]) -> list[Tensor]:
    """Four words of Philox4x32-10 for each counter, whose words broadcast; of them at least one is a tensor."""
    a, b, c, d = counter
    k, m = key
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_c, low_c) = (_product(n, by) for n, by in zip((a, c), _MULTIPLIERS, strict=True))
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = (k + _STEPS[0]) & WORD, (m + _STEPS[1]) & WORD
    tensors = [torch.as_tensor(word) for word in (a, b, c, d)]
    return list(torch.broadcast_tensors(*tensors))


def _product(n: Tensor | int, by: int) -> tuple[Tensor | int, Tensor | int]:
    """The high and the low word of a product of two words."""
    low, high = (n & 0xFFFF) * by, (n >> 16) * by
    high = high + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
