"""How results of `attention` lie in memory: as what they belong to, heads before tokens or tokens before heads, so that
torch's kernels write them as they do for their own op, and models view them as they view those."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def heads_first(like: Tensor) -> bool:
    """Whether `like` [b, heads, tokens, channels] is known to lie in that order."""
    return bool(statically_known_true(like.stride(1) > like.stride(2)))


def empty_like_tokens(like: Tensor, heads: Any, tokens: Any, channels: Any) -> Tensor:
    """Memory for [b, heads, tokens, channels], laid out as `like`."""
    if heads_first(like):
        return like.new_empty((like.shape[0], heads, tokens, channels))
    return like.new_empty((like.shape[0], tokens, heads, channels)).transpose(1, 2)


def in_whole_rows(t: Tensor) -> Tensor:
    """`t` [b, heads, tokens, channels], or a copy in its layout: with contiguous channels, and rows of their own that
    are known to begin at multiples of 16 bytes."""
    rows = [t.stride(d) for d in range(3) if not statically_known_true(t.shape[d] == 1)]
    whole = all(statically_known_true(n * t.itemsize % 16 == 0) for n in (t.storage_offset(), *rows))
    whole = whole and not any(statically_known_true(n == 0) for n in rows)
    return t if whole and statically_known_true(t.stride(3) == 1) else laid_out(t, t)


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """`x` [b, heads, tokens, channels] in the layout of `empty_like_tokens`."""
    return x.contiguous() if heads_first(like) else x.transpose(1, 2).contiguous().transpose(1, 2)
