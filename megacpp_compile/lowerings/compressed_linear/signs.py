"""A random matrix of signs as a function of its key: Philox4x32-10, in operations on int64 that every target has.

Philox maps a key of two words of 32 bits and a counter of four to four random words, in rounds. Each word is in an
int64 here, and products are taken in halves, so that none leaves 63 bits, where targets would differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_BITS, _WORDS = 32, 4
ENTRIES = _BITS * _WORDS  # that one counter makes

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def magnitude(rank: int) -> float:
    """The power of two next to 1 / sqrt(rank): what the entries of `signs` are but for their sign."""
    return float(2.0 ** -round(math.log2(rank) / 2))


def signs(rows: int, rank: int, draw: Tensor | None, seed: int, like: Tensor) -> Tensor:
    """[rows, rank] of `magnitude(rank)` and its negative, in the dtype and on the device of `like`.

    Entry (i, j) is bit i * rank + j of the words that Philox makes with the key `seed` of the counters (0, 0, draw),
    (1, 0, draw), ...
    """
    return signs_of(philox(counters(rows * rank, draw, like.device), seed), rows, rank, like)


def counters(size: int, draw: Tensor | None, device: torch.device) -> Words:
    """The counters that `size` signs take, as words of one shape."""
    entry = torch.arange(-(-size // ENTRIES), device=device)
    drawn = torch.zeros_like(entry) if draw is None else draw.expand_as(entry)
    low = drawn & WORD
    # torch_xla shifts a negative number towards zero: what is shifted has no bits to lose.
    return entry & WORD, entry >> 32, low, ((drawn - low) >> 32) & WORD


def key(seed: int, number: Any) -> tuple[Any, Any]:
    """The two words of the key in round `number`, an int or a tensor."""
    return ((seed & WORD) + number * _STEPS[0]) & WORD, ((seed >> 32) + number * _STEPS[1]) & WORD


def philox(counter: Words, seed: int) -> Words:
    """Four words of Philox for each counter."""
    for number in range(ROUNDS):
        counter = round_of(counter, key(seed, number))
    return counter


def round_of(words: Words, words_of_key: tuple[Any, Any]) -> Words:
    """One round of Philox."""
    a, b, c, d = words
    (high_a, low_a), (high_c, low_c) = (_product(n, by) for n, by in zip((a, c), _MULTIPLIERS, strict=True))
    return high_c ^ b ^ words_of_key[0], low_c, high_a ^ d ^ words_of_key[1], low_a


def signs_of(words: Words, rows: int, rank: int, like: Tensor) -> Tensor:
    """The bits of the words as a matrix of signs."""
    bits = (torch.stack(words, -1)[..., None] >> torch.arange(_BITS, device=like.device)) & 1
    return ((1 - 2 * bits).to(like.dtype) * magnitude(rank)).flatten()[: rows * rank].view(rows, rank)


def _product(n: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two words."""
    low, high = (n & 0xFFFF) * by, (n >> 16) * by
    high = high + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
