"""Parts of `gated_delta_rule` as ops of their own, for Inductor takes no kernels of Gluon.

Registered with the op itself, as a graph from a cache on disk names them where nothing has been lowered. What they do
is in `_walks`, `_entering_states` and `_head_gradients`, which call them, and need Triton.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


@torch.library.custom_op("megacpp_delta::walk", mutates_args=())
def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    mixed: Tensor,
    factors: Tensor,
    initial_state: Optional[Tensor],  # noqa: UP045  custom_op reads typing.Optional on every supported torch
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_walks.walk` of bfloat16 operands without documents and with a gate a head: o, the last state, and those that
    enter segments."""
    from megacpp_compile.lowerings.gated_delta_rule import _walks

    return _walks.on_hopper(q, k, v, inverse, mixed, factors, initial_state, scale)


@walk.register_fake
def _(q, k, v, inverse, mixed, factors, initial_state, scale):  # type: ignore[no-untyped-def]
    from megacpp_compile.lowerings.gated_delta_rule import _walks

    return _walks.promised(q, k, v)


@torch.library.custom_op("megacpp_delta::entering_states", mutates_args=())
def entering_states(
    k: Tensor, v: Tensor, kept: Tensor, solve: Tensor, decay: Tensor, steps: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """`_entering_states.entering_states` of the same."""
    from megacpp_compile.lowerings.gated_delta_rule import _entering_states

    return _entering_states.on_hopper(k, v, kept, solve, decay, steps, norms)


@entering_states.register_fake
def _(k, v, kept, solve, decay, steps, norms):  # type: ignore[no-untyped-def]
    from megacpp_compile.lowerings.gated_delta_rule import _entering_states

    return _entering_states.promised(k, v)


@torch.library.custom_op("megacpp_delta::gradients", mutates_args=())
def gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],  # noqa: UP045
    beta: Optional[Tensor],  # noqa: UP045
    decay: Tensor,
    steps: Tensor,
    norms: Tensor,
    states: Tensor,
    errors: Tensor,
    d_states: Tensor,
    d_rows: Tensor,
    scale: float,
    eps: Optional[float],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_head_gradients.gradients` of the same: dq, dk, dv, dg and dbeta."""
    from megacpp_compile.lowerings.gated_delta_rule import _head_gradients

    parts = {"decay": decay, "steps": steps, "norms": norms, "states": states, "errors": errors, "d_states": d_states,
             "d_rows": d_rows}  # fmt: skip
    dq, dk, dv, dg, dbeta = _head_gradients.on_hopper(do, q, k, v, g, beta, parts, scale, eps)
    return dq, dk, dv, dg, dbeta


@gradients.register_fake
def _(do, q, k, v, g, beta, decay, steps, norms, states, errors, d_states, d_rows, scale, eps):  # type: ignore[no-untyped-def]
    from megacpp_compile.lowerings.gated_delta_rule import _head_gradients

    return _head_gradients.promised(do, q, k, v, g, beta, scale, eps)
