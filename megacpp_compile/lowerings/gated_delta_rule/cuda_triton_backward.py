"""The backward of `gated_delta_rule` on CUDA in Triton.

What forward kept is the state that enters every 8th chunk and T's rows. Chunks side by side, `prepare` makes what no
state enters; segments side by side, `_entering_states` makes the states that enter all chunks; `_reverse_walk`, the one
sequential part, walks back over the chunks for the gradients of the states and of R; and, chunks side by side again,
`_head_gradients` makes all others. With gates a channel the first and the last are others (`_backward_channels`).
`_after_prepare` has their order. No atomics: equal inputs give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _after_prepare, _triton_states
from megacpp_compile.lowerings.gated_delta_rule._backward_call import (
    NARROW,
    BackwardOperands,
    prepare_args,
    prepared,
    shared_memory,
)
from megacpp_compile.lowerings.gated_delta_rule._backward_channels import GatesAChannel

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
    call = BackwardOperands(do, q, k, v, g, beta, cu_seqlens, scale, qk_norm_eps, chunk_size)
    if call.empty:
        d_initial = call.new(call.sequences, call.heads, call.K, call.V)
        d_initial.zero_() if dfinal is None else d_initial.copy_(dfinal)
        dq, dk, dv, dg, dbeta = (call.new(0) if t is None else torch.zeros_like(t) for t in (q, k, v, g, beta))
    else:
        kept, inverse = states.contiguous(), inverse.contiguous()
        if call.per_channel:
            grads = GatesAChannel(call).backward(dfinal, kept, initial_state, inverse)
        else:
            grads = _after_prepare.of_heads(call, dfinal, kept, initial_state, inverse, _prepare(call, inverse))
        dq, dk, dv, dg, dbeta, d_initial = grads
    d_initial = call.new(0) if initial_state is None else d_initial.to(initial_state.dtype)
    return dq, dk, dv, dg, dbeta, d_initial


def _prepare(call: BackwardOperands, inverse: Tensor) -> dict[str, Tensor]:
    """The decays, steps and norms, and a chunk's parts that no state enters."""
    made = {"decay": call.by_chunk(call.heads, call.C)} | prepared(call)
    g = call.do if call.g is None else call.g
    _triton_states.prepare(
        lambda meta: (call.chunks * call.heads, call.batch),
        NARROW, g=g, GATED=int(call.g is not None),
        out_keys=call.k, dots=call.nothing, small_decay=call.nothing, SMALL_DECAY=0,
        **strides("g", g, "bth"), **made, **prepare_args(call, inverse),
    )  # fmt: skip
    return made | {"q": call.q, "k": call.k, "out_keys": call.k, "ends": made["decay"]}
