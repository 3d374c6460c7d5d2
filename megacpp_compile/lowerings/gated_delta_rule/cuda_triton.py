"""`gated_delta_rule` on CUDA in Triton: chunks side by side for what no state has a part in, then one walk over them.

Forward prepares each chunk's inverse T and its scores times T (`_triton_prepare`, with gates a channel
`_triton_channels`), then walks over the chunks of a head with the state in registers and writes o on the way
(`_triton_walk`). In memory beside the result: two matrices [tokens, heads, chunk] of which backward reads one, and a
state every `STATES_EVERY` chunks. No atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY, chunks_bound, segments_bound
from megacpp_compile.lowerings._kernels.triton_launch import last_dim_contiguous, strides
from megacpp_compile.lowerings.gated_delta_rule import _triton_channels, _triton_prepare, _triton_walk
from megacpp_compile.lowerings.gated_delta_rule._chunk_tables import ChunkTables
from megacpp_compile.lowerings.gated_delta_rule._mild_chunks import MildChunks
from megacpp_compile.lowerings.gated_delta_rule.cuda_triton_backward import gated_delta_rule_backward, shared_memory
from megacpp_compile.lowerings.gated_delta_rule.reference import inverse_dtype

__all__ = ["gated_delta_rule", "gated_delta_rule_backward", "supports"]

KEY_SIZES = (16, 32, 64, 128)
VALUE_SIZES = (16, 32, 64, 128, 256)
# Channels of v that a program of the walk has, and chunks it has loaded or is loading.
COLUMNS, STAGES = 32, 3
# Blocks a launch can have along a dimension other than the first.
MOST_BLOCKS = 65535


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    backward = name.endswith("_backward")
    q, k, v, g, beta, initial_state, cu_seqlens = args[2:9] if backward else args[:7]
    given = [t for t in (q, k, v, g, beta, initial_state) if t is not None]
    if any(t.dtype == torch.float64 for t in given):
        return "float64: tensor cores multiply in float32 at most"
    if any(not t.dtype.is_floating_point or t.dtype.itemsize < 2 for t in given):
        return "an operand is neither float32, float16 nor bfloat16"
    sizes = (*k.shape[2:], *v.shape[2:])
    if not all(isinstance(size, int) for size in sizes):
        return f"symbolic heads or head sizes: {sizes}"
    _, keys, heads, values = sizes
    if keys not in KEY_SIZES or values not in VALUE_SIZES:
        return f"keys of {keys} with values of {values}: kernels have {KEY_SIZES} and {VALUE_SIZES}"
    sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if heads > MOST_BLOCKS or isinstance(sequences, int) and sequences > MOST_BLOCKS:
        return f"more than {MOST_BLOCKS} heads or sequences"
    if backward:
        return _too_large(shared_memory(args[13], keys, any(t.dtype != torch.bfloat16 for t in (q, k, v))), v.device)
    return _too_large(_shared_memory(args[9], keys, g is not None and g.dim() == 4), v.device)


class Call:
    """Sizes, operands as the kernels read them (channels contiguous in memory, any other strides), and, with documents,
    where their chunks and segments are."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, cu_seqlens: Tensor | None,
        chunk_size: int,
    ) -> None:  # fmt: skip
        self.batch, self.tokens, self.key_heads, self.K = k.shape
        self.heads, self.V = v.shape[2:]
        self.q, self.k, self.v = (last_dim_contiguous(t) for t in (q, k, v))
        self.per_channel = g is not None and g.dim() == 4
        self.g = last_dim_contiguous(g) if g is not None and self.per_channel else g
        self.beta, self.documents, self.chunk = beta, cu_seqlens, chunk_size
        # GEMMs of bfloat16 operands take them as they are; of any other, float32 in three TF32 passes.
        self.wide = any(t.dtype != torch.bfloat16 for t in (q, k, v))
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
        read none of them, and get a tensor that is there anyway."""
        if self.documents is None:
            return (self.v,) * 3
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


def _shared_memory(chunk: int, keys: int, per_channel: bool) -> int:
    """Bytes that a program of the walk keeps in shared memory: the operands of `STAGES` chunks, and what it makes of
    one. float32 operands take two stages, and no more."""
    operands = chunk * (keys * (3 if per_channel else 2) + 2 * chunk + COLUMNS)
    return 2 * (STAGES * operands + COLUMNS * (keys + 2 * chunk))


def _too_large(needed: int, device: torch.device) -> str | None:
    """Why the GPU has no room for a program of the walk, or None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    there = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", needed)
    return f"{needed >> 10} KiB of shared memory, where this GPU has {there >> 10}" if needed > there else None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_norm_eps: float | None,
    chunk_size: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(q, k, v, g, beta, cu_seqlens, chunk_size)
    o = call.new(call.batch, call.tokens, call.heads, call.V, dtype=out_dtype)
    last = call.new(call.sequences, call.heads, call.K, call.V)
    states = call.new(call.batch, call.segments, call.heads, call.K, call.V)
    if cu_seqlens is not None or call.empty:
        states = states.zero_()  # segments that are not there
    rows = call.batch, call.tokens, call.heads
    inverse, mixed = (call.new(*rows, chunk_size, dtype=call.narrow) for _ in range(2))
    kept = inverse_dtype(q, k, v, torch.float32)
    if call.empty:
        last = last.zero_() if initial_state is None else initial_state.to(torch.float32, copy=True)
        return o, last, states, inverse.to(kept)
    documents, places, bases = call.tables()
    prepared = _prepared(call, places, inverse, mixed, scale, qk_norm_eps)
    columns, stages = min(call.V, COLUMNS), 2 if call.wide else STAGES
    _triton_walk.walk(
        lambda meta: (call.V // columns, call.heads, call.sequences), {"num_warps": 4, "num_stages": stages},
        **prepared, v=call.v, inverse=inverse, mixed=mixed,
        first_state=last if initial_state is None else initial_state.contiguous(), documents=documents, bases=bases,
        o=o, states=states, last=last, tokens=call.tokens, heads=call.heads, chunks=call.chunks,
        segments=call.segments, scale=scale, **strides("v", call.v, "bth"), C=chunk_size, K=call.K, V=call.V,
        BV=columns, EVERY=STATES_EVERY, FIRST=int(initial_state is not None), DOCUMENTS=int(cu_seqlens is not None),
        WIDE=int(call.wide),
    )  # fmt: skip
    return o, last, states, inverse.to(kept)


def _prepared(
    call: Call, places: Tensor, inverse: Tensor, mixed: Tensor, scale: float, eps: float | None
) -> dict[str, Any]:
    """Writes a chunk's inverse and its scores, and returns what else the walk reads: q, k and factors of rows."""

    def grid(meta: Any) -> tuple[Any, ...]:
        return call.chunks, call.heads, call.batch

    norm = {"scale": scale, "eps": 0.0 if eps is None else eps, "NORM": int(eps is not None)}
    factors = call.new(1 if call.per_channel else 5, call.batch, call.heads, call.tokens)
    common = call.heads_and_strides() | norm | {"places": places, "inverse": inverse, "mixed": mixed,
                                                "factors": factors, "chunks": call.chunks}  # fmt: skip
    if not call.per_channel:
        _triton_prepare.prepare(
            grid, {"num_warps": 8 if call.wide else 4, "num_stages": 1}, out_keys=call.k, dots=call.v, mild=places,
            MILD=0, **common,
        )  # fmt: skip
        return {"q": call.q, "k": call.k, "out_keys": call.k, "factors": factors, "ends": factors, "CHANNELS": 0,
                "per_key": call.heads // call.key_heads, **strides("q", call.q, "bth"),
                **strides("k", call.k, "bth")}  # fmt: skip
    assert call.g is not None
    chunks = MildChunks(
        call.q, call.k, call.g, places, call.chunks, call.chunk, eps, call.documents is not None, call.wide
    )
    launch = {"num_warps": 4, "num_stages": 1}
    _triton_channels.prepare(
        grid, launch, gated_q=chunks.queries, gated_k=chunks.keys, out_keys=chunks.out_keys, ends=chunks.ends,
        mild=chunks.mild, SKIP=int(chunks.told_apart), BK=min(call.K, _triton_channels.AT_ONCE),
        **{name: arg for name, arg in common.items() if name != "GATED"},
    )  # fmt: skip
    if chunks.told_apart:
        inside = {"GATED": 0, "NORM": 0, "MILD": 1}
        _triton_prepare.prepare(grid, launch, dots=chunks.dots, mild=chunks.mild, **(common | chunks.rows() | inside))
    return chunks.rows() | {"factors": factors, "ends": chunks.ends, "CHANNELS": 1}
