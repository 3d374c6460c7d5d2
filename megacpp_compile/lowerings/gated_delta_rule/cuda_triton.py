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

from megacpp_compile.lowerings._kernels.triton_launch import MOST_BLOCKS, too_large, unfit
from megacpp_compile.lowerings.gated_delta_rule import _triton_channels, _triton_prepare
from megacpp_compile.lowerings.gated_delta_rule._forward_call import COLUMNS, STAGES, ForwardOperands
from megacpp_compile.lowerings.gated_delta_rule._small_decay_chunks import SmallDecayChunks
from megacpp_compile.lowerings.gated_delta_rule._walks import rows_as_they_are, walk
from megacpp_compile.lowerings.gated_delta_rule.cuda_triton_backward import gated_delta_rule_backward, shared_memory
from megacpp_compile.lowerings.gated_delta_rule.reference import inverse_dtype

__all__ = ["gated_delta_rule", "gated_delta_rule_backward", "supports"]

KEY_SIZES = (16, 32, 64, 128)
VALUE_SIZES = (16, 32, 64, 128, 256)


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    backward = name.endswith("_backward")
    q, k, v, g, beta, initial_state, cu_seqlens = args[2:9] if backward else args[:7]
    sizes = (*k.shape[2:], *v.shape[2:])
    if (why := unfit((q, k, v, g, beta, initial_state), sizes)) is not None:
        return why
    _, keys, heads, values = sizes
    if keys not in KEY_SIZES or values not in VALUE_SIZES:
        return f"keys of {keys} with values of {values}: kernels have {KEY_SIZES} and {VALUE_SIZES}"
    sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if heads > MOST_BLOCKS or isinstance(sequences, int) and sequences > MOST_BLOCKS:
        return f"more than {MOST_BLOCKS} heads or sequences"
    if backward:
        return too_large(shared_memory(args[13], keys, any(t.dtype != torch.bfloat16 for t in (q, k, v))), v.device)
    return too_large(_shared_memory(args[9], keys, g is not None and g.dim() == 4), v.device)


def _shared_memory(chunk: int, keys: int, per_channel: bool) -> int:
    """Bytes that a program of the walk keeps in shared memory: the operands of `STAGES` chunks, and what it makes of
    one. float32 operands take two stages, and no more."""
    operands = chunk * (keys * (3 if per_channel else 2) + 2 * chunk + COLUMNS)
    return 2 * (STAGES * operands + COLUMNS * (keys + 2 * chunk))


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
    call = ForwardOperands(q, k, v, g, beta, cu_seqlens, chunk_size)
    kept = inverse_dtype(q, k, v, torch.float32)
    if call.empty:
        last = call.new(call.sequences, call.heads, call.K, call.V)
        last = last.zero_() if initial_state is None else initial_state.to(torch.float32, copy=True)
        states = torch.zeros(call.batch, call.segments, call.heads, call.K, call.V, device=v.device)
        o = call.new(call.batch, call.tokens, call.heads, call.V, dtype=out_dtype)
        return o, last, states, call.new(call.batch, call.tokens, call.heads, chunk_size, dtype=kept)
    inverse, mixed = (call.new(call.batch, call.tokens, call.heads, chunk_size, dtype=call.inner) for _ in range(2))
    documents, places, bases = call.tables()
    prepared = _prepared(call, places, inverse, mixed, scale, qk_norm_eps)
    o, last, states = walk(call, prepared, (documents, bases), inverse, mixed, initial_state, scale, out_dtype)
    return o, last, states, inverse.to(kept)


def _prepared(
    call: ForwardOperands, places: Tensor, inverse: Tensor, mixed: Tensor, scale: float, eps: float | None
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
            grid, {"num_warps": 8 if call.wide else 4, "num_stages": 1}, out_keys=call.k, dots=call.nothing,
            small_decay=call.nothing, SMALL_DECAY=0, **common,
        )  # fmt: skip
        return rows_as_they_are(call) | {"factors": factors, "ends": factors}
    assert call.g is not None
    chunks = SmallDecayChunks(
        call.q, call.k, call.g, places, call.chunks, call.C, eps, call.documents is not None, call.wide
    )
    launch = {"num_warps": 4, "num_stages": 1}
    _triton_channels.prepare(
        lambda meta: (chunks.programs,), launch, gated_q=chunks.queries, gated_k=chunks.keys,
        out_keys=chunks.out_keys, ends=chunks.ends, BK=min(call.K, _triton_channels.AT_ONCE), **chunks.by_cuts(),
        **{name: arg for name, arg in common.items() if name != "GATED"},
    )  # fmt: skip
    if chunks.told_apart:
        inside = {"GATED": 0, "NORM": 0, "SMALL_DECAY": 1}
        _triton_prepare.prepare(grid, launch, dots=chunks.dots, small_decay=chunks.small_decay,
                                **(common | chunks.rows() | inside))
    return chunks.rows() | {"factors": factors, "ends": chunks.ends, "CHANNELS": 1}
