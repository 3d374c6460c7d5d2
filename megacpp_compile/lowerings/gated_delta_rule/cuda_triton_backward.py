"""The backward of `gated_delta_rule` on CUDA in Triton.

What forward kept is the state that enters every 8th chunk and T's rows. Chunks side by side, `prepare` makes what no
state enters; segments side by side, `states` makes the states that enter all chunks; `reverse_walk`, the one sequential
part, walks back over the chunks for the gradients of the states; and, chunks side by side again, `query_grad`,
`value_grad` and `key_grad` make all gradients. With gates a channel the first and the last are others
(`_backward_channels`). No atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _triton_gradients, _triton_reverse_walk, _triton_states
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
        made |= _states(call, kept, initial_state, made)
        made |= _reverse_walk(call, dfinal, documents, d_initial, made)
        grads = _gradients(call, inverse, made) if channels is None else channels.gradients(inverse, made)
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
        out_keys=call.k, dots=call.do, mild=call.nothing, MILD=0,
        **strides("g", g, "bth"), **made, **prepare_args(call, inverse),
    )  # fmt: skip
    return made | {"reading": call.q, "writing": call.k, "ends": made["decay"]}


def _states(call: Call, kept: Tensor, initial: Tensor | None, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """The states that enter all chunks, and the errors."""
    out = {
        "states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "errors": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
    }
    columns = call.at_once(64)
    _triton_states.states(
        lambda meta: (kept.shape[1] * call.heads, call.V // columns, call.batch),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=columns, k=made["writing"], v=call.v,
        kept=kept,
        starts=call.packed.starts if call.packed else call.nothing, per_key=call.per_state, segments=kept.shape[1],
        initial=kept if initial is None else initial.contiguous(), EVERY=STATES_EVERY,
        INITIAL=int(initial is not None), CHANNELS=int(call.per_channel), **out,
        **only(made, "solve w decay steps norms ends"), **strides("k", made["writing"], "bth"),
        **call.strides_of("v"), **call.common,
    )  # fmt: skip
    return out


def _reverse_walk(
    call: Call, dfinal: Tensor | None, documents: Any, d_initial: Tensor, made: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the states that leave the chunks, and of U."""
    out = {
        "d_states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "du": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
    }
    _triton_reverse_walk.reverse_walk(
        lambda meta: (call.V // call.at_once(COLUMNS), call.heads, documents),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=call.at_once(COLUMNS), q=made["reading"],
        k=made["writing"], do=call.do, documents=call.packed.documents if call.packed else call.nothing,
        last=d_initial if dfinal is None else dfinal.contiguous(), d_initial=d_initial, per_key=call.per_state,
        scale=call.scale, CHANNELS=int(call.per_channel), LAST=int(dfinal is not None), **out,
        **only(made, "w turned decay steps norms ends"), **strides("q", made["reading"], "bth"),
        **strides("k", made["writing"], "bth"), **call.strides_of("do"), **call.common,
    )  # fmt: skip
    return out


def _gradients(call: Call, inverse: Tensor, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
    q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
    dq, dk, dv = (call.new(*t.shape, dtype=t.dtype) for t in (q, k, v))
    dg, dbeta = (call.new(0) if t is None else call.new(*t.shape, dtype=t.dtype) for t in (g, beta))
    passed = {
        "d_scores": call.by_chunk(call.key_heads, call.C, call.C, dtype=call.inner),
        "d_between": call.by_chunk(call.key_heads, call.C, call.C, dtype=call.inner),
        "d_decay": call.by_chunk(call.heads, _triton_gradients.PARTS, call.C),
    }
    launch = {"num_warps": 4, "num_stages": 1}
    common = {"BV": call.at_once(64), "HB": call.per_key, "key_heads": call.key_heads, "d_decay": passed["d_decay"],
              **only(made, "decay steps norms errors"), **call.common}  # fmt: skip
    norm = {"NORM": int(call.eps is not None)}
    _triton_gradients.query_grad(
        lambda meta: call.by_key, launch, q=q, k=k, do=call.do, dq=dq, scale=call.scale, states=made["states"],
        d_scores=passed["d_scores"], **norm, **call.strides_of("q", "k", "do"), **(common | {"BV": call.at_once(128)}),
    )  # fmt: skip
    _triton_gradients.value_grad(
        lambda meta: call.by_key, launch, k=k, inverse=inverse, du=made["du"], dv=dv, dbeta=dbeta,
        d_between=passed["d_between"], CHANNELS=0, BETA=int(beta is not None), **call.strides_of("k"), **common,
    )  # fmt: skip
    _triton_gradients.key_grad(
        lambda meta: call.by_key, {"num_warps": 8, "num_stages": 1}, q=q, k=k, dv=dv, dk=dk, dg=dg,
        d_scores=passed["d_scores"], d_between=passed["d_between"], GATED=int(g is not None), **norm,
        **only(made, "states d_states"), **call.strides_of("q", "k"), **(common | {"BV": call.at_once(128)}),
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta
