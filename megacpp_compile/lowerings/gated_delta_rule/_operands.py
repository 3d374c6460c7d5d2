"""Operands of recurrences of queries, keys and values as kernels over chunks read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.chunk_grid import chunks_bound
from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens, last_dim_contiguous


class ChunkOperands:
    """Sizes, and operands [b, tokens, heads, channels]: channels contiguous in memory, rows in sixteens.

    C: tokens of a chunk. sequences: how many there are, documents or rows of a batch. wide: whether any operand is not
    bfloat16, whose GEMMs take it as it is; of any other, float32 in three TF32 passes. inner: the dtype of what one
    kernel leaves to another.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, chunk: int
    ) -> None:
        self.batch, self.tokens, self.key_heads, self.K = k.shape
        self.heads, self.V = v.shape[2:]
        self.C, self.q, self.k, self.v = chunk, *(in_sixteens(t) for t in (q, k, v))
        self.per_channel = g is not None and g.dim() == 4
        self.g = last_dim_contiguous(g) if g is not None and self.per_channel else g
        self.wide = any(t.dtype != torch.bfloat16 for t in (q, k, v))
        self.inner = torch.float32 if self.wide else torch.bfloat16
        self.chunks = chunks_bound(self.tokens, chunk, cu_seqlens)
        self.sequences = self.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        # For what kernels do not read. Never an operand: torch takes those for written, and copies them.
        self.nothing = torch.empty(0, dtype=torch.int32, device=v.device)

    @property
    def empty(self) -> bool:
        return any(statically_known_true(size == 0) for size in (self.batch, self.tokens, self.heads))

    @property
    def per_key(self) -> Any:
        """Value heads that read one key head."""
        return self.heads // self.key_heads

    def new(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.v.device)
