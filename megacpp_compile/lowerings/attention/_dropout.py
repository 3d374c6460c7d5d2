"""Which weights of an attention are dropped: a function of random words and of the weight's place, so that forward and
backward, and kernels of any block sizes, drop the same ones.

The words are what torch draws, int64 [s + b * h * t] of non-negative numbers: one for each key, and one for each query
of each head. The weight of query i for key j is dropped where a hash of a * c + b is below the probability: a and b are
the upper and the lower 32 bits of the query's word, c are the lower 32 bits of the key's. So what is kept for backward
is as long as a row's sum, and kernels need few instructions for each weight. Multipliers have 31 bits, so that no
product leaves 63, where targets would differ.
"""

from __future__ import annotations

from torch import Tensor

# Words are below it. torch_xla shifts negative numbers towards zero: there are none.
WORDS = 2**63 - 1
LOWER = 0xFFFFFFFF
# Of a bijection of 32 bits without bias, https://github.com/skeeto/hash-prospector/issues/19.
MULTIPLIER = 0x735A2D97


def least(p: float) -> int:
    """The least hash of a weight that is kept."""
    return round(p * 2**32)


def factor(p: float) -> float:
    """What weights that are kept are multiplied by."""
    return 1 / (1 - p) if p < 1 else 0.0


def kept(words: Tensor, p: float, batches: int, heads: int, queries: int, keys: int) -> Tensor:
    """bool [batches, heads, queries, keys]."""
    c, of_queries = words[:keys] & LOWER, words[keys:].view(batches, heads, queries, 1)
    x = ((of_queries >> 32 | 1) * c + (of_queries & LOWER)) & LOWER
    return ((x ^ x >> 15) * MULTIPLIER & LOWER) >= least(p)


def factors(words: Tensor | None, p: float, weights: Tensor) -> Tensor | None:
    """What weights [b, h, t, s] are multiplied by, 0 for those that are dropped; None without dropout."""
    return None if words is None else kept(words, p, *weights.shape).to(weights.dtype) * factor(p)


def dropped(weights: Tensor, by: Tensor | None) -> Tensor:
    """Weights times their `factors`."""
    return weights if by is None else weights * by
