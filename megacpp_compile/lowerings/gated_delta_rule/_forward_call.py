"""A call of `gated_delta_rule`'s forward: its sizes, and its operands as kernels read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import segments_bound
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule._chunk_tables import ChunkTables
from megacpp_compile.lowerings.gated_delta_rule._operands import ChunkOperands

# Channels of v that a program of Triton's walk has, and chunks it has loaded or is loading.
COLUMNS, STAGES = 32, 3


class ForwardOperands(ChunkOperands):
    """Adds, with documents, where their chunks and segments are."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, cu_seqlens: Tensor | None,
        chunk_size: int,
    ) -> None:  # fmt: skip
        super().__init__(q, k, v, g, cu_seqlens, chunk_size)
        self.beta, self.documents = beta, cu_seqlens
        self.segments = segments_bound(self.tokens, chunk_size, cu_seqlens)

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """int32: cu_seqlens, the chunks' tokens (`ChunkTables`), and documents' first chunks. Without documents kernels
        read none of them."""
        if self.documents is None:
            return (self.nothing,) * 3
        tables = ChunkTables(self.documents, self.C, self.chunks)
        return self.documents.to(torch.int32), tables.chunks, tables.documents[:, 0].contiguous()

    def heads_and_strides(self) -> dict[str, Any]:
        """Arguments that the kernels over chunks have in common."""
        beta = self.v if self.beta is None else self.beta
        g = self.v if self.g is None else self.g
        return {"q": self.q, "k": self.k, "g": g, "beta": beta, "tokens": self.tokens, "heads": self.heads,
                "per_key": self.per_key, **strides("q", self.q, "bth"), **strides("k", self.k, "bth"),
                **strides("g", g, "bth"), **strides("beta", beta, "bth"), "C": self.C, "K": self.K,
                "GATED": int(self.g is not None), "BETA": int(self.beta is not None),
                "DOCUMENTS": int(self.documents is not None), "WIDE": int(self.wide)}  # fmt: skip
