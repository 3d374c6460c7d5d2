"""A call of `gated_delta_rule`'s forward: its sizes, and its operands as kernels read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.chunk_grid import chunks_bound, segments_bound
from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens, last_dim_contiguous, strides
from megacpp_compile.lowerings.gated_delta_rule._chunk_tables import ChunkTables

# Channels of v that a program of Triton's walk has, and chunks it has loaded or is loading.
COLUMNS, STAGES = 32, 3


class ForwardOperands:
    """Sizes, operands as the kernels read them (channels contiguous in memory, rows in sixteens), and, with documents,
    where their chunks and segments are."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, cu_seqlens: Tensor | None,
        chunk_size: int,
    ) -> None:  # fmt: skip
        self.batch, self.tokens, self.key_heads, self.K = k.shape
        self.heads, self.V = v.shape[2:]
        self.q, self.k, self.v = (in_sixteens(t) for t in (q, k, v))
        self.per_channel = g is not None and g.dim() == 4
        self.g = last_dim_contiguous(g) if g is not None and self.per_channel else g
        self.beta, self.documents, self.chunk = beta, cu_seqlens, chunk_size
        # GEMMs of bfloat16 operands take them as they are; of any other, float32 in three TF32 passes.
        self.wide = any(t.dtype != torch.bfloat16 for t in (q, k, v))
        # For what kernels have no use for. Never an operand: torch takes what a kernel does not read for what it may
        # write, and copies it.
        self.nothing = torch.empty(0, dtype=torch.int32, device=v.device)
        self.sequences = self.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.chunks = chunks_bound(self.tokens, chunk_size, cu_seqlens)
        self.segments = segments_bound(self.tokens, chunk_size, cu_seqlens)
        self.empty = any(statically_known_true(n == 0) for n in (self.batch, self.tokens, self.heads))

    @property
    def narrow(self) -> torch.dtype:
        """What matrices between kernels are kept in."""
        return torch.float32 if self.wide else torch.bfloat16

    def new(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.v.device)

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """int32: cu_seqlens, the chunks' tokens (`ChunkTables`), and documents' first chunks. Without documents kernels
        read none of them."""
        if self.documents is None:
            return (self.nothing,) * 3
        tables = ChunkTables(self.documents, self.chunk, self.chunks)
        return self.documents.to(torch.int32), tables.chunks, tables.documents[:, 0].contiguous()

    def heads_and_strides(self) -> dict[str, Any]:
        """Arguments that the kernels over chunks have in common."""
        beta = self.v if self.beta is None else self.beta
        g = self.v if self.g is None else self.g
        return {"q": self.q, "k": self.k, "g": g, "beta": beta, "tokens": self.tokens, "heads": self.heads,
                "per_key": self.heads // self.key_heads, **strides("q", self.q, "bth"), **strides("k", self.k, "bth"),
                **strides("g", g, "bth"), **strides("beta", beta, "bth"), "C": self.chunk, "K": self.K,
                "GATED": int(self.g is not None), "BETA": int(self.beta is not None),
                "DOCUMENTS": int(self.documents is not None), "WIDE": int(self.wide)}  # fmt: skip
