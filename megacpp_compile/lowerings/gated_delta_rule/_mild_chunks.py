"""Which chunks of gates a channel are mild, and their queries and keys with the gates inside (`_triton_mild`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _triton_mild

# Rows of a chunk that a program's loop has unrolled: half of the shortest chunk at most.
ROWS = 8


def told_apart(wide: bool) -> bool:
    """Whether mild chunks have kernels of their own. Not for float32, `wide`: factors that grow would cost digits."""
    return not wide


class MildChunks:
    """Of gates g [b, tokens, heads, K] a channel.

    mild int32 [b, chunks, heads]; queries, keys, out_keys [b, tokens, heads, K] in `dtype`; dots float32
    [b, tokens, heads]; ends float32 [b, chunks, heads, 3, K]. Kernels for the other chunks write their own parts of
    these but `dots`, and all of them where chunks are not told apart.
    places: the first and last tokens of documents' chunks.
    """

    def __init__(
        self, q: Tensor, k: Tensor, g: Tensor, places: Tensor, chunks: Any, chunk: int, eps: float | None,
        documents: bool, wide: bool,
    ) -> None:  # fmt: skip
        batch, tokens, heads, size = g.shape
        dtype = torch.float32 if wide else torch.bfloat16

        def new(*shape: Any, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=g.device)

        self.mild = new(batch, chunks, heads, dtype=torch.int32)
        self.queries, self.keys, self.out_keys = (new(batch, tokens, heads, size, dtype=dtype) for _ in range(3))
        self.dots = new(batch, tokens, heads, dtype=torch.float32)
        self.ends = new(batch, chunks, heads, 3, size, dtype=torch.float32)
        self.told_apart = told_apart(wide)
        if self.told_apart:
            _triton_mild.mild_chunks(
                lambda meta: (chunks, heads, batch), {"num_warps": 1, "num_stages": 1, "ROWS": ROWS}, q=q, k=k, g=g,
                places=places, mild=self.mild, queries=self.queries, keys=self.keys, out_keys=self.out_keys,
                dots=self.dots, ends=self.ends, tokens=tokens, heads=heads, per_key=heads // k.shape[2],
                chunks=chunks, eps=eps or 0.0,
                **strides("q", q, "bth"), **strides("k", k, "bth"), **strides("g", g, "bth"), C=chunk, K=size,
                NORM=int(eps is not None), DOCUMENTS=int(documents),
            )  # fmt: skip

    def rows(self) -> dict[str, Any]:
        """Arguments of kernels that read these queries and keys."""
        return {"q": self.queries, "k": self.keys, "out_keys": self.out_keys, "per_key": 1,
                **strides("q", self.queries, "bth"), **strides("k", self.keys, "bth")}  # fmt: skip
