"""`_dropout` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings.attention import _dropout

_MULTIPLIER = tl.constexpr(_dropout.MULTIPLIER)


@triton.jit
def words_of_queries(words, keys, row, i, tokens):
    """(a, b) of queries i; row: the place of the head's first query."""
    word = tl.load(words + keys + row + i, mask=i < tokens, other=0)
    return (word >> 32).to(tl.uint32) | 1, word.to(tl.uint32)


@triton.jit
def words_of_keys(words, j, keys):
    """c of keys j."""
    return tl.load(words + j, mask=j < keys, other=0).to(tl.uint32)


@triton.jit
def kept(a, b, c, least):
    """Where weights are kept; least: as `_dropout.least`, less 2^31, as hashes are compared with a sign."""
    x = a * c + b
    x = (x ^ (x >> 15)) * _MULTIPLIER
    return (x ^ 0x80000000).to(tl.int32, bitcast=True) >= least
