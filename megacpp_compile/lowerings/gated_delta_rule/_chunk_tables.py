"""Where chunks and documents of packed sequences lie: integers on the device, so that nobody waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ChunkTables:
    """Chunks never cross a document's start. There are at most `most`, a number that lengths do not change, and those
    behind the last have no tokens.

    All int32. chunks [most, 2]: the first token, and the document's end. starts [most]: the document that begins with a
    chunk, or -1; stops: the one that ends with it. documents [n, 2]: the first chunk, and how many.
    """

    def __init__(self, cu_seqlens: Tensor, chunk_size: int, most: Any) -> None:
        begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        counts = (end - begin + chunk_size - 1) // chunk_size
        behind = counts.cumsum(0)
        before = behind - counts
        chunk = torch.arange(most, device=cu_seqlens.device)
        owner = torch.searchsorted(behind, chunk, right=True).clamp(max=counts.shape[0] - 1)
        inside = chunk - before[owner]
        used = inside < counts[owner]
        first = begin[owner] + inside * chunk_size
        self.chunks = torch.stack((first * used, end[owner] * used), 1).int()
        self.starts = torch.where(used & (inside == 0), owner, -1).int()
        self.stops = torch.where(used & (inside + 1 == counts[owner]), owner, -1).int()
        self.documents = torch.stack((before, counts), 1).int()
