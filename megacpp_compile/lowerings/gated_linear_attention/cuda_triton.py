"""`gated_linear_attention` on CUDA in Triton: segments of eight chunks side by side.

Forward walks over each segment from nothing for what it adds to the state, joins those sums one after the other, and
walks once more, the state in registers, for o (`_triton_walk`, `_triton_output`): in memory beside the results are one
state a segment and, with gates a channel, queries and keys with the gates inside (`_channels`). Backward makes all
chunks' states and their gradients anew by the same walks, and everything else chunk by chunk (`_triton_gradients`).
Scores are one GEMM, times a mask of decays where a head has a gate. No atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import (
    MOST_BLOCKS,
    in_sixteens,
    power_of_2,
    strides,
    too_large,
    unfit,
)
from megacpp_compile.lowerings.gated_linear_attention import _triton_gradients, _triton_output
from megacpp_compile.lowerings.gated_linear_attention._call import COLUMNS, LinearAttentionOperands, without
from megacpp_compile.lowerings.gated_linear_attention._channels import Channels

__all__ = ["gated_linear_attention", "gated_linear_attention_backward", "supports"]

# Channels of keys that kernels have at most, of bfloat16 operands and of others.
MOST_KEYS, MOST_WIDE_KEYS = 256, 128
QUERY_GRADIENTS, KEY_GRADIENTS = {"num_warps": 8, "num_stages": 1}, {"num_warps": 8, "num_stages": 1}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    q, k, v, g, initial_state = args[2:7] if name.endswith("_backward") else args[:5]
    sizes = (*k.shape[2:], *v.shape[2:])
    if (why := unfit((q, k, v, g, initial_state), sizes)) is not None:
        return why
    _, keys, heads, values = sizes
    wide = any(t.dtype != torch.bfloat16 for t in (q, k, v))
    most = MOST_WIDE_KEYS if wide else MOST_KEYS
    if not 0 < keys <= most or not values:
        return f"keys of {keys} with values of {values}: kernels of these dtypes have up to {most}"
    if heads > MOST_BLOCKS or isinstance(k.shape[0], int) and k.shape[0] > MOST_BLOCKS:
        return f"more than {MOST_BLOCKS} heads or sequences"
    chunk = args[10 if name.endswith("_backward") else 7]
    return too_large(_shared_memory(chunk, _padded(keys, values)[0], wide), v.device)


def _shared_memory(chunk: int, keys: int, wide: bool) -> int:
    """Bytes that a program of the walk over queries, keys and values takes, the most of all kernels."""
    if wide:
        return 4 * 3 * chunk * keys
    return 2 * (2 * chunk * (2 * keys + COLUMNS) + keys * COLUMNS + chunk * chunk)


def _padded(keys: int, values: int) -> tuple[int, int]:
    """The sizes of heads that kernels have."""
    return max(16, power_of_2(keys)), max(16, power_of_2(values)) if values <= 64 else (values + 63) // 64 * 64


def _grown(t: Tensor, *sizes: int) -> Tensor:
    """`t` with zeros behind its last dimensions, so that they are of these sizes."""
    added = [n for size, have in zip(sizes[::-1], t.shape[::-1], strict=False) for n in (0, size - have)]
    return F.pad(t, added) if any(added) else t


def _all_grown(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    keys, values = sizes
    gates = g if g is None or g.dim() == 3 else _grown(g, keys)
    initial_state = None if initial_state is None else _grown(initial_state, *sizes)
    return _grown(q, keys), _grown(k, keys), _grown(v, values), gates, initial_state


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    K, V = k.shape[3], v.shape[3]
    if (K, V) != (sizes := _padded(K, V)):
        q, k, v, g, initial_state = _all_grown(q, k, v, g, initial_state, sizes)
        o, last, states = gated_linear_attention(q, k, v, g, initial_state, cu_seqlens, scale, chunk_size, out_dtype)
        return o[..., :V].contiguous(), last[..., :K, :V].contiguous(), states[..., :K, :V].contiguous()
    call = LinearAttentionOperands(q, k, v, g, cu_seqlens, scale, chunk_size)
    o = call.new(call.batch, call.tokens, call.heads, call.V, dtype=out_dtype)
    if call.empty:
        states = torch.zeros(call.batch, call.segments, call.heads, call.K, call.V, device=v.device)
        return o, _begun(call, initial_state), states
    rows = Channels(call).rows() if call.per_channel else call.rows()
    states = call.entering(rows, call.v, initial_state)
    last, (starts, stops) = call.result(initial_state), call.edges()
    _triton_output.output(
        lambda meta: (call.segments * call.heads, call.V // call.at_once, call.batch),
        {"num_warps": call.warps, "num_stages": call.stages}, v=call.v, starts=starts,
        stops=stops, entering=states, o=o, last=last, scale=call.scale, **strides("v", call.v, "bth"), **rows,
        **strides("q", rows["q"], "bth"), **strides("k", rows["k"], "bth"), **call.outside(initial_state),
        **call.walked,
    )  # fmt: skip
    return o, last, states


def _begun(call: LinearAttentionOperands, given: Tensor | None) -> Tensor:
    """What is left of sequences without tokens."""
    if given is not None:
        return given.to(torch.float32, copy=True)
    return torch.zeros(call.sequences, call.heads, call.K, call.V, device=call.v.device)


def gated_linear_attention_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    K, V = k.shape[3], v.shape[3]
    if (K, V) != (sizes := _padded(K, V)):
        do, dfinal = _grown(do, sizes[1]), None if dfinal is None else _grown(dfinal, *sizes)
        states, given = _grown(states, *sizes), _all_grown(q, k, v, g, initial_state, sizes)
        dq, dk, dv, dg, d_initial = gated_linear_attention_backward(
            do, dfinal, *given, cu_seqlens, states, scale, chunk_size
        )
        dg = dg[..., :K] if g is not None and g.dim() == 4 else dg
        d_initial = d_initial if initial_state is None else d_initial[..., :K, :V]
        dq, dk, dv = (d[..., :n].contiguous() for d, n in ((dq, K), (dk, K), (dv, V)))
        return dq, dk, dv, dg.contiguous(), d_initial.contiguous()
    call = LinearAttentionOperands(q, k, v, g, cu_seqlens, scale, chunk_size)
    if call.empty:
        dq, dk, dv, dg = (call.new(0) if t is None else torch.zeros_like(t) for t in (q, k, v, g))
        d_initial = _begun(call, dfinal)
    else:
        dq, dk, dv, dg, d_initial = _backward(call, in_sixteens(do), dfinal, initial_state, states.contiguous())
    return dq, dk, dv, dg, call.new(0) if initial_state is None else d_initial.to(initial_state.dtype)


def _backward(
    call: LinearAttentionOperands, do: Tensor, dfinal: Tensor | None, initial_state: Tensor | None, kept: Tensor
) -> tuple[Tensor, ...]:
    channels = Channels(call) if call.per_channel else None
    rows = call.rows() if channels is None else channels.rows()
    states, _ = call.states(rows, call.v, initial_state, kept)
    left = call.entering(rows, do, dfinal, reverse=True)
    d_states, d_initial = call.states(rows, do, dfinal, left, reverse=True)
    dv, d_end = call.new(*call.v.shape, dtype=call.v.dtype), call.nothing
    d_scores = call.by_chunk(call.C, call.C, dtype=call.inner)
    dg = call.new(0)
    if channels is None:
        dq, dk = (call.new(*t.shape, dtype=t.dtype) for t in (call.q, call.k))
        dg = dg if call.g is None else call.new(*call.g.shape, dtype=call.g.dtype)
    else:
        dq, dk = (call.by_chunk(call.C, call.K) for _ in range(2))
        d_end = call.by_chunk(call.K)
    key_heads = call.key_heads if channels is None else call.heads
    reads = call.by_chunk(call.C) if call.gated else call.nothing
    shared = {"v": call.v, "do": do, "states": states, "reads": reads, "d_scores": d_scores,
              "key_heads": key_heads, "HB": rows["per_key"],
              "scale": call.scale, "K": call.K, "V": call.V, "BV": call.at_once, **strides("q", rows["q"], "bth"),
              **strides("k", rows["k"], "bth"), **strides("v", call.v, "bth"), **strides("do", do, "bth"),
              **without(rows, "per_key", "ends"), **call.common}  # fmt: skip
    _triton_gradients.query_gradients(
        lambda meta: (call.chunks * key_heads, call.batch), QUERY_GRADIENTS, dq=dq, **shared,
    )  # fmt: skip
    _triton_gradients.key_gradients(
        lambda meta: (call.chunks * key_heads, call.batch), KEY_GRADIENTS, d_states=d_states, dk=dk, dv=dv, dg=dg,
        d_end=d_end, **shared,
    )  # fmt: skip
    if channels is not None:
        dq, dk, dg = channels.gradients(dq, dk, d_scores, d_end)
    return dq, dk, dv, dg, d_initial
