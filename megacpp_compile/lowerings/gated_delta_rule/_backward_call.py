"""A call of `gated_delta_rule`'s backward: its sizes, its operands as kernels read them, and what kernels share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens, strides
from megacpp_compile.lowerings.gated_delta_rule._chunk_tables import ChunkTables
from megacpp_compile.lowerings.gated_delta_rule._operands import ChunkOperands

# Launches of kernels over chunks.
NARROW, BROAD = {"num_warps": 4, "num_stages": 1}, {"num_warps": 8, "num_stages": 1}
# Channels of v that a program of the reverse walk has, and chunks it has loaded or is loading.
COLUMNS, STAGES = 32, 3


class BackwardOperands(ChunkOperands):
    """Adds the gradient of the output."""

    def __init__(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, eps: float | None, chunk_size: int,
    ) -> None:  # fmt: skip
        super().__init__(q, k, v, g, cu_seqlens, chunk_size)
        self.do, self.beta, self.scale, self.eps = in_sixteens(do), beta, scale, eps
        self.packed = ChunkTables(cu_seqlens, chunk_size, self.chunks) if cu_seqlens is not None else None
        # Value heads that read one row of keys on their way to the state.
        self.per_state = 1 if self.per_channel else self.per_key
        self.cuts = chunk_size.bit_length() - 1
        self.by_key = (self.chunks * self.key_heads, self.batch)
        sizes = {"C": chunk_size, "K": self.K, "V": self.V, "PACKED": int(self.packed is not None)}
        self.common = {"tokens": self.tokens, "chunks": self.chunks, "heads": self.heads,
                       "table": self.packed.chunks if self.packed else self.nothing,
                       "WIDE": int(self.wide), **sizes}  # fmt: skip

    def at_once(self, columns: int) -> int:
        """Channels of v that a program takes at once."""
        return min(self.V, 32 if self.wide else columns)

    def stages(self, narrow: int) -> int:
        return _stages(self.C, self.K, self.wide, narrow)

    def by_chunk(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.new(self.batch, self.chunks, *shape, dtype=dtype)

    def strides_of(self, *names: str) -> dict[str, Any]:
        return {name: at for of in names for name, at in strides(of, getattr(self, of), "bth").items()}


def _stages(chunk: int, keys: int, wide: bool, narrow: int) -> int:
    """Chunks that a walk has in shared memory: as many as fit in float32. One is avoided: with it Triton 3.6 reads
    beyond (see `ssd_scan`)."""
    return narrow if not wide else 2 if chunk * keys <= 64 * 64 else 1


def shared_memory(chunk: int, keys: int, wide: bool) -> int:
    """Bytes of it that a program of the reverse walk takes, the most of all kernels."""
    numbers = _stages(chunk, keys, wide, STAGES) * chunk * (3 * keys + COLUMNS + 2 * chunk) + COLUMNS * (keys + chunk)
    return numbers * (4 if wide else 2)


def prepared(call: BackwardOperands) -> dict[str, Tensor]:
    heads, C = call.heads, call.C
    return {
        "steps": call.by_chunk(heads, C),
        "norms": call.by_chunk(heads, 2, C),
        "solve": call.by_chunk(heads, C, C, dtype=call.inner),
        "scores_t": call.by_chunk(heads, C, C, dtype=call.inner),
    }


def prepare_args(call: BackwardOperands, inverse: Tensor) -> dict[str, Any]:
    beta = call.do if call.beta is None else call.beta
    return {"q": call.q, "k": call.k, "beta": beta, "inverse": inverse, "scale": call.scale,
            "eps": call.eps or 0.0, "per_key": call.per_key, "BETA": int(call.beta is not None),
            "NORM": int(call.eps is not None), **strides("beta", beta, "bth"), **call.strides_of("q", "k"),
            **call.common}  # fmt: skip


def only(made: dict[str, Tensor], names: str) -> dict[str, Tensor]:
    return {name: made[name] for name in names.split()}
