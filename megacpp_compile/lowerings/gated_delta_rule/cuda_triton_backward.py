"""The backward of `gated_delta_rule` on CUDA in Triton.

What forward kept is the state that enters every 8th chunk and T's rows. Chunks side by side, `prepare` makes what no
state enters; segments side by side, `_entering_states` makes the states that enter all chunks; `reverse_walk`, the one
sequential part, walks back over the chunks for the gradients of the states and of R; and, chunks side by side again,
`_head_gradients` makes all others. With gates a channel the first and the last are others (`_backward_channels`). No
atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _head_gradients, _triton_reverse_walk, _triton_states
from megacpp_compile.lowerings.gated_delta_rule._backward_call import (
    COLUMNS,
    STAGES,
    Call,
    only,
    prepare_args,
    prepared,
    shared_memory,
)
from megacpp_compile.lowerings.gated_delta_rule._backward_channels import GatesAChannel
from megacpp_compile.lowerings.gated_delta_rule._entering_states import entering_states

__all__ = ["gated_delta_rule_backward", "shared_memory"]


def gated_delta_rule_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    inverse: Tensor,
    scale: float,
    qk_norm_eps: float | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(do, q, k, v, g, beta, cu_seqlens, scale, qk_norm_eps, chunk_size)
    documents = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else call.batch
    d_initial = call.new(documents, call.heads, call.K, call.V)
    if call.empty:
        d_initial.zero_() if dfinal is None else d_initial.copy_(dfinal)
        dq, dk, dv, dg, dbeta = (call.new(0) if t is None else torch.zeros_like(t) for t in (q, k, v, g, beta))
    else:
        kept, inverse = states.contiguous(), inverse.contiguous()
        channels = GatesAChannel(call) if call.per_channel else None
        made = _prepare(call, inverse) if channels is None else channels.prepare(inverse)
        made |= entering_states(call, kept, initial_state, made)
        made |= _reverse_walk(call, dfinal, documents, d_initial, inverse, made)
        grads = _head_gradients.gradients(call, made) if channels is None else channels.gradients(made)
        dq, dk, dv, dg, dbeta = grads
    d_initial = call.new(0) if initial_state is None else d_initial.to(initial_state.dtype)
    return dq, dk, dv, dg, dbeta, d_initial


def _prepare(call: Call, inverse: Tensor) -> dict[str, Tensor]:
    """The decays, steps and norms, and a chunk's parts that no state enters."""
    made = {"decay": call.by_chunk(call.heads, call.C)} | prepared(call)
    g = call.do if call.g is None else call.g
    _triton_states.prepare(
        lambda meta: (call.chunks * call.heads, call.batch),
        {"num_warps": 4, "num_stages": 1}, g=g, GATED=int(call.g is not None),
        out_keys=call.k, dots=call.nothing, mild=call.nothing, MILD=0,
        **strides("g", g, "bth"), **made, **prepare_args(call, inverse),
    )  # fmt: skip
    return made | {"q": call.q, "k": call.k, "out_keys": call.k, "ends": made["decay"]}


def _reverse_walk(
    call: Call, dfinal: Tensor | None, documents: Any, d_initial: Tensor, inverse: Tensor,
    made: dict[str, Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of the states that leave the chunks, and of R."""
    out = {
        "d_states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "d_rows": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
    }
    _triton_reverse_walk.reverse_walk(
        lambda meta: (call.V // call.at_once(COLUMNS), call.heads, documents),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=call.at_once(COLUMNS), do=call.do,
        inverse=inverse, documents=call.packed.documents if call.packed else call.nothing,
        last=d_initial if dfinal is None else dfinal.contiguous(), d_initial=d_initial, per_key=call.per_state,
        scale=call.scale, CHANNELS=int(call.per_channel), LAST=int(dfinal is not None), **out,
        **only(made, "q k out_keys turned decay steps norms ends"), **strides("q", made["q"], "bth"),
        **strides("k", made["k"], "bth"), **call.strides_of("do"), **call.common,
    )  # fmt: skip
    return out
