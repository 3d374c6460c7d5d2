"""Tokens by chunk, for recurrences that carry a state from chunk to chunk; documents may stand behind one another.

Without `cu_seqlens` a chunk is `length` tokens in a row, the last one padded. With it (b = 1) each document has chunks
of its own, so that none crosses the start of a document, and the chunks of all documents stand behind one another.
How many that are depends on values; there is room for ceil(t / length) + n, and those behind the last are empty.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._op import ends_until

# A state is kept for backward where every so many chunks begin.
STATES_EVERY = 8


def chunks_bound(tokens: int, length: int, cu_seqlens: Tensor | None) -> int:
    """The number of chunks of `length` tokens there is room for."""
    documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (tokens + length - 1) // length + documents


def segments_bound(tokens: int, length: int, cu_seqlens: Tensor | None) -> int:
    """The number of states kept: `STATES_EVERY` chunks of the grid are a segment, whatever documents they are of."""
    return (chunks_bound(tokens, length, cu_seqlens) + STATES_EVERY - 1) // STATES_EVERY


class ChunkGrid:
    """c: chunks, l: tokens of one, n: sequences (rows of a batch, or documents)."""

    def __init__(self, tokens: int, length: int, cu_seqlens: Tensor | None) -> None:
        self.tokens, self.length = tokens, length
        self.chunks = chunks_bound(tokens, length, cu_seqlens)
        self.packed = cu_seqlens is not None
        if cu_seqlens is not None:
            self._place(cu_seqlens.long())

    def _place(self, ends: Tensor) -> None:
        """Where each chunk and each token of documents is. ends: [n + 1]."""
        begin, sizes = ends[:-1], ends.diff()
        counts = (sizes + self.length - 1) // self.length
        self.some = (sizes > 0)[:, None, None, None]  # [n, 1, 1, 1]: documents that have tokens
        behind = counts.cumsum(0)
        self.first, self.last = behind - counts, behind - 1  # [n]
        chunk = torch.arange(self.chunks, device=ends.device)
        last_document = max(len(sizes) - 1, 0)
        self.document = ends_until(behind, chunk).clamp(max=last_document)  # [c]
        used = chunk < behind[-1] if len(sizes) else chunk < 0
        self.starts = used & (chunk == self.first[self.document])  # [c]
        self.stops = used & (chunk == self.last[self.document])
        inside = (chunk - self.first[self.document])[:, None] * self.length
        inside = inside + torch.arange(self.length, device=ends.device)  # [c, l], counted from its document's start
        self.valid = used[:, None] & (inside < sizes[self.document][:, None])
        self.token = (inside + begin[self.document][:, None]).clamp(0, max(self.tokens - 1, 0))
        token = torch.arange(self.tokens, device=ends.device)
        of = ends_until(ends[1:].contiguous(), token).clamp(max=last_document)
        self.slot = self.first[of] * self.length + token - begin[of]  # [t], in the chunks laid flat

    def split(self, x: Tensor) -> Tensor:
        """[b, t, h, ...] -> [b, c, h, l, ...], zero where there is no token."""
        if self.packed:
            if not self.tokens:
                return x.new_zeros((x.shape[0], self.chunks, x.shape[2], self.length, *x.shape[3:]))
            chunks = torch.where(self.valid.view(self.chunks, self.length, *[1] * (x.dim() - 2)), x[:, self.token], 0)
        else:
            behind = self.chunks * self.length - self.tokens
            chunks = F.pad(x, (0, 0) * (x.dim() - 2) + (0, behind)).unflatten(1, (self.chunks, self.length))
        return chunks.transpose(2, 3).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """[b, c, h, l, ...] -> [b, t, h, ...]."""
        flat = x.transpose(2, 3).flatten(1, 2)
        return flat[:, self.slot] if self.packed else flat[:, : self.tokens]

    def restarted(self, state: Tensor, initial: Tensor, at: slice) -> Tensor:
        """The states [b, c', h, ...] that enter the chunks `at`, for those that come in from the chunks before."""
        if not self.packed:
            return state
        return torch.where(self.starts[at, None, None, None], initial[self.document[at]], state)

    def begin(self, outside: Tensor) -> Tensor:
        """[n, h, ...] -> [b, h, ...]: what enters a walk over chunks."""
        return outside.new_zeros((1, *outside.shape[1:])) if self.packed else outside

    def end(self, states: Tensor, outside: Tensor, backward: bool) -> Tensor:
        """[n, h, ...]: what a walk over documents leaves of each, of its results [1, c, h, ...] by chunk."""
        chunk = (self.first if backward else self.last).clamp(0, self.chunks - 1)
        return torch.where(self.some, states[0, chunk], outside)
