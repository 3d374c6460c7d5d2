"""A call of `gated_linear_attention` or of its backward as kernels read it: sizes, decays, walks over states."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY, segments_bound
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule._chunk_tables import ChunkTables
from megacpp_compile.lowerings.gated_delta_rule._operands import ChunkOperands
from megacpp_compile.lowerings.gated_linear_attention import _triton_walk

# Channels of v that a program has at once, and of float32 operands.
COLUMNS, WIDE_COLUMNS = 64, 32


class LinearAttentionOperands(ChunkOperands):
    """Adds where documents begin and end, and what kernels share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk: int
    ) -> None:
        super().__init__(q, k, v, g, cu_seqlens, chunk)
        self.gated, self.scale = g is not None and not self.per_channel, scale
        self.segments = segments_bound(self.tokens, chunk, cu_seqlens)
        self.packed = ChunkTables(cu_seqlens, chunk, self.chunks) if cu_seqlens is not None else None
        self.places = self.packed.chunks if self.packed else self.nothing
        self.common = {"table": self.places, "tokens": self.tokens, "chunks": self.chunks, "heads": self.heads,
                       "C": chunk, "PACKED": int(self.packed is not None), "WIDE": int(self.wide)}  # fmt: skip
        # A 1 would be a constant to Triton, of which ptxas 12.8 has made wrong rows (`_triton_reverse_walk`).
        self.walked = {"behind_last": self.chunks + 1, "EVERY": STATES_EVERY, "K": self.K, "V": self.V,
                       "BV": self.at_once, **self.common}  # fmt: skip

    @property
    def at_once(self) -> int:
        return min(self.V, WIDE_COLUMNS if self.wide else COLUMNS)

    @property
    def warps(self) -> int:
        """Of programs that have a state in registers."""
        return 8 if self.wide or self.K > 128 else 4

    @property
    def stages(self) -> int:
        """Chunks that the walk over queries, keys and values has in shared memory; walks over two have one more."""
        return 1 if self.wide else 2

    def by_chunk(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.new(self.batch, self.chunks, self.heads, *shape, dtype=dtype)

    def decay(self) -> Tensor:
        """float32 [b, c, h, C], or nothing where no head has a gate."""
        if not self.gated or self.g is None:
            return self.nothing
        made = self.by_chunk(self.C)
        _triton_walk.decay(
            lambda meta: (self.chunks, triton.cdiv(self.heads, meta["BH"]), self.batch), {"BH": 16, "num_warps": 4},
            g=self.g, decay=made, **strides("g", self.g, "bth"), **without(self.common, "WIDE"),
        )  # fmt: skip
        return made

    def rows(self) -> dict[str, Any]:
        """Arguments for queries and keys as they are, with a gate a head or none. Channels': `_channels`."""
        return {"q": self.q, "k": self.k, "per_key": self.per_key, "decay": self.decay(),
                "ends": self.nothing, "small_decay": self.nothing, "dots": self.nothing, "scores": self.nothing,
                "GATED": int(self.gated), "CHANNELS": 0}  # fmt: skip

    def edges(self, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """[c]: the document that begins with a chunk and the one that ends, or, reverse, the other way round."""
        if self.packed is None:
            return self.nothing, self.nothing
        found = self.packed.starts, self.packed.stops
        return found[::-1] if reverse else found

    def outside(self, given: Tensor | None) -> dict[str, Any]:
        """States [n, h, K, V] that walks begin with, or none."""
        return {"outside": self.nothing if given is None else given.contiguous(), "OUTSIDE": int(given is not None)}

    def result(self, given: Tensor | None) -> Tensor:
        """Room for what is left of sequences [n, h, K, V]; of documents without tokens it is what they were given."""
        shape = self.sequences, self.heads, self.K, self.V
        if self.packed is None:
            return self.new(*shape)
        return torch.zeros(shape, device=self.v.device) if given is None else given.to(torch.float32, copy=True)

    def entering(self, rows: dict[str, Any], y: Tensor, outside: Tensor | None, reverse: bool = False) -> Tensor:
        """float32 [b, s, h, K, V]: the states that enter segments, or, reverse, gradients of those that leave them."""
        made = self.new(self.batch, self.segments, self.heads, self.K, self.V)
        totals = self.new(self.batch, self.segments, self.heads, self.K if self.per_channel else 1)
        if not statically_known_true(self.segments == 1):
            self._walk(rows, y, outside, reverse, entering=made, totals=totals, states=None, last=None)
        _triton_walk.join(
            lambda meta: (triton.cdiv(self.K * self.V, meta["BLOCK"]), self.heads, self.batch),
            {"BLOCK": 512, "num_warps": 4}, entering=made, totals=totals, starts=self.edges()[0],
            segments=self.segments, K=self.K, V=self.V, EVERY=STATES_EVERY, REVERSE=int(reverse),
            CHANNELS=int(self.per_channel), **self.outside(outside),
            **without(self.common, "tokens", "C", "WIDE"),
        )  # fmt: skip
        return made

    def states(
        self, rows: dict[str, Any], y: Tensor, outside: Tensor | None, entering: Tensor, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """[b, c, h, K, V] as chunks read them, and, reverse, the gradient of the first [n, h, K, V]."""
        made = self.by_chunk(self.K, self.V, dtype=self.inner)
        last = self.result(outside) if reverse else self.nothing
        self._walk(rows, y, outside, reverse, entering=entering, totals=None, states=made, last=last)
        return made, last

    def _walk(
        self, rows: dict[str, Any], y: Tensor, outside: Tensor | None, reverse: bool, entering: Tensor,
        totals: Tensor | None, states: Tensor | None, last: Tensor | None,
    ) -> None:  # fmt: skip
        x = rows["q" if reverse else "k"]
        edges, others = self.edges(reverse)
        written = {"totals": totals, "states": states, "last": last}
        _triton_walk.walk(
            lambda meta: (self.segments * self.heads, self.V // self.at_once, self.batch),
            {"num_warps": self.warps, "num_stages": self.stages + 1}, x=x, y=y, edges=edges,
            others=others, entering=entering, scale=self.scale, **strides("x", x, "bth"), **strides("y", y, "bth"),
            REVERSE=int(reverse), STATES=int(states is not None), **self.outside(outside),
            **{name: self.nothing if t is None else t for name, t in written.items()}, **self.walked,
            **{name: rows[name] for name in ("decay", "ends", "per_key", "GATED", "CHANNELS")},
        )  # fmt: skip


def without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: arg for name, arg in arguments.items() if name not in names}
