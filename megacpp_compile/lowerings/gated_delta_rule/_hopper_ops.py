"""Parts of `gated_delta_rule` as ops of their own, for Inductor takes no kernels of Gluon.

Registered with the op itself, as a graph from a cache on disk names them where nothing has been lowered. What they do
is in `_walks`, `_small_decay_chunks` and `_after_prepare`, which call them, and need Triton. All take bfloat16
operands without documents.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import kernel_op


@kernel_op("megacpp_delta::walk")
def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    mixed: Tensor,
    factors: Tensor,
    initial_state: Optional[Tensor],  # noqa: UP045  kernel_op reads typing.Optional on every supported torch
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_walks.walk` with a gate a head: o, the last state, and those that enter segments."""
    from megacpp_compile.lowerings.gated_delta_rule import _walks

    return _walks.on_hopper(q, k, v, inverse, mixed, factors, initial_state, scale)


@torch.library.register_fake("megacpp_delta::walk")
def _(q, k, v, inverse, mixed, factors, initial_state, scale):  # type: ignore[no-untyped-def]
    from megacpp_compile.lowerings.gated_delta_rule import _walks

    return _walks.promised(q, k, v)


@kernel_op("megacpp_delta::small_decay_chunks")
def small_decay_chunks(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    eps: Optional[float],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_small_decay_chunks.SmallDecayChunks`: small_decay, queries, keys, out_keys, dots and ends."""
    from megacpp_compile.lowerings.gated_delta_rule import _small_decay_chunks

    small_decay, queries, keys, out_keys, dots, ends = _small_decay_chunks.on_hopper(q, k, g, eps)
    return small_decay, queries, keys, out_keys, dots, ends


@torch.library.register_fake("megacpp_delta::small_decay_chunks")
def _(q, k, g, eps):  # type: ignore[no-untyped-def]
    from megacpp_compile.lowerings.gated_delta_rule import _small_decay_chunks

    return _small_decay_chunks.promised(g)


@kernel_op("megacpp_delta::backward")
def backward(
    do: Tensor,
    dfinal: Optional[Tensor],  # noqa: UP045
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],  # noqa: UP045
    beta: Optional[Tensor],  # noqa: UP045
    kept: Tensor,
    inverse: Tensor,
    decay: Tensor,
    steps: Tensor,
    norms: Tensor,
    solve: Tensor,
    scores_t: Tensor,
    scale: float,
    eps: Optional[float],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_after_prepare.of_heads`."""
    from megacpp_compile.lowerings.gated_delta_rule import _after_prepare

    dq, dk, dv, dg, dbeta, d_initial = _after_prepare.heads_on_hopper(
        (do, q, k, v, g, beta), dfinal, kept, inverse, (decay, steps, norms, solve, scores_t), scale, eps
    )
    return dq, dk, dv, dg, dbeta, d_initial


@torch.library.register_fake("megacpp_delta::backward")
def _(do, dfinal, q, k, v, g, beta, kept, inverse, decay, steps, norms, solve, scores_t, scale, eps):  # type: ignore[no-untyped-def]
    from megacpp_compile.lowerings.gated_delta_rule import _after_prepare

    return _after_prepare.fake_outputs((do, q, k, v, g, beta), scale, eps)


@kernel_op("megacpp_delta::backward_channels")
def backward_channels(
    do: Tensor,
    dfinal: Optional[Tensor],  # noqa: UP045
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Optional[Tensor],  # noqa: UP045
    kept: Tensor,
    inverse: Tensor,
    queries: Tensor,
    keys: Tensor,
    out_keys: Tensor,
    small_decay: Tensor,
    ends: Tensor,
    steps: Tensor,
    solve: Tensor,
    scores_t: Tensor,
    scale: float,
    eps: Optional[float],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_after_prepare.of_channels`: dq, dk, dv, dg, dbeta, the first state's, d_between, states, errors, d_states."""
    from megacpp_compile.lowerings.gated_delta_rule import _after_prepare

    parts = queries, keys, out_keys, small_decay, ends, steps, solve, scores_t
    dq, dk, dv, dg, dbeta, d_initial, d_between, states, errors, d_states = _after_prepare.channels_on_hopper(
        (do, q, k, v, g, beta), dfinal, kept, inverse, parts, scale, eps
    )
    return dq, dk, dv, dg, dbeta, d_initial, d_between, states, errors, d_states


@torch.library.register_fake("megacpp_delta::backward_channels")
def _(do, dfinal, q, k, v, g, beta, kept, inverse, *parts_scale_eps):  # type: ignore[no-untyped-def]
    from megacpp_compile.lowerings.gated_delta_rule import _after_prepare

    return _after_prepare.channels_promised((do, q, k, v, g, beta), *parts_scale_eps[-2:])
