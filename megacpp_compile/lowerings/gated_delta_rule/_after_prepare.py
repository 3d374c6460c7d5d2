"""What `gated_delta_rule`'s backward launches behind `prepare`: the states, the walk back, and the gradients.

In Triton one after the other. On Hopper in Gluon, as one op, and partly side by side: a program of the walk back has a
multiprocessor to itself there, and there is one for every second of them. What does not wait for it, the states that
enter chunks and with gates a head the gradient of q, takes the others meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings.gated_delta_rule import (
    _channel_gradients,
    _entering_states,
    _head_gradients,
    _hopper,
    _reverse_walk,
)
from megacpp_compile.lowerings.gated_delta_rule._backward_call import BackwardOperands, only

_NAME = "gated_delta_rule_backward"
# What the kernels read of what is written before them, of gates a head, and a channel; and what they leave to others.
_OF_HEADS = "decay steps norms solve scores_t"
_OF_CHANNELS = "queries keys out_keys small_decay ends steps solve scores_t"
_LEFT = "states errors d_states"


def of_heads(
    call: BackwardOperands, dfinal: Tensor | None, kept: Tensor, initial: Tensor | None, inverse: Tensor,
    made: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dg, dbeta and the first state's, in float32.

    dfinal: the gradient of the last state. kept, inverse: what forward has kept. made: what `prepare` has written.
    """
    if not _served(call):
        return _heads_in_triton(call, dfinal, kept, initial, inverse, made)
    operands = call.do, dfinal, call.q, call.k, call.v, call.g, call.beta, kept, inverse
    return torch.ops.megacpp_delta.backward(*operands, *only(made, _OF_HEADS).values(), call.scale, call.eps)


def of_channels(
    call: BackwardOperands, dfinal: Tensor | None, kept: Tensor, initial: Tensor | None, inverse: Tensor,
    made: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The same of gates a channel, with dq, dk and dg as `_channel_gradients` leaves them; and what kernels by cuts
    read: states, errors, d_states, dv and d_between. made: also queries, keys, small_decay and spare."""
    if not _served(call):
        results = _channels_in_triton(call, dfinal, kept, initial, inverse, made)
    else:
        operands = call.do, dfinal, call.q, call.k, call.v, call.g, call.beta, kept, inverse
        results = torch.ops.megacpp_delta.backward_channels(
            *operands, *only(made, _OF_CHANNELS).values(), call.scale, call.eps
        )
    *grads, d_between, states, errors, d_states = results
    left = {"states": states, "errors": errors, "d_states": d_states, "dv": grads[2], "d_between": d_between}
    return tuple(grads), left


def _served(call: BackwardOperands) -> bool:
    return call.do.dtype == torch.bfloat16 and _hopper.serve(call, call.C, call.packed is not None, call.per_channel)


def _walked(
    call: BackwardOperands, dfinal: Tensor | None, kept: Tensor, initial: Tensor | None, inverse: Tensor,
    made: dict[str, Tensor]
) -> dict[str, Tensor]:
    """`made`, the states, the errors, and what the walk back gives, in Triton."""
    walked, entered = _reverse_walk.results(call), _entering_states.results(call)
    _entering_states.in_triton(call, kept, initial, made, entered)
    _reverse_walk.in_triton(call, dfinal, inverse, made, walked)
    return made | walked | entered


def _heads_in_triton(
    call: BackwardOperands, dfinal: Tensor | None, kept: Tensor, initial: Tensor | None, inverse: Tensor,
    made: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    made = _walked(call, dfinal, kept, initial, inverse, made)
    return *_head_gradients.in_triton(call, made), made["d_initial"]


def _channels_in_triton(
    call: BackwardOperands, dfinal: Tensor | None, kept: Tensor, initial: Tensor | None, inverse: Tensor,
    made: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    made = _walked(call, dfinal, kept, initial, inverse, made)
    *grads, d_between = _channel_gradients.in_triton(call, made)
    return *grads, made["d_initial"], d_between, *only(made, _LEFT).values()


# --- on Hopper, of bfloat16 operands without documents


def heads_on_hopper(
    operands: tuple[Tensor | None, ...], dfinal: Tensor | None, kept: Tensor, inverse: Tensor,
    parts: tuple[Tensor, ...], scale: float, eps: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the op `megacpp_delta::backward` does. operands: do, q, k, v, g and beta. parts: those of `_OF_HEADS`."""
    call, made = _call(operands, scale, eps), dict(zip(_OF_HEADS.split(), parts, strict=True))
    made |= {"q": call.q, "k": call.k, "out_keys": call.k, "ends": made["decay"]}
    return _hopper.kernels.or_in_triton(
        _NAME,
        lambda: _heads_in_gluon(call, dfinal, kept, inverse, made),
        lambda: _heads_in_triton(call, dfinal, kept, None, inverse, made),
    )


def fake_outputs(operands: tuple[Tensor | None, ...], scale: float, eps: float | None) -> tuple[Tensor, ...]:
    call = _call(operands, scale, eps)
    return *_head_gradients.results(call), _reverse_walk.results(call)["d_initial"]


def channels_on_hopper(
    operands: tuple[Tensor | None, ...], dfinal: Tensor | None, kept: Tensor, inverse: Tensor,
    parts: tuple[Tensor, ...], scale: float, eps: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the op `megacpp_delta::backward_channels` does. parts: those of `_OF_CHANNELS`."""
    call, made = _call(operands, scale, eps), dict(zip(_OF_CHANNELS.split(), parts, strict=True))
    # Decays and norms of rows are inside of these, and of no part of their own.
    made |= {"q": made["queries"], "k": made["keys"], "decay": made["steps"], "norms": made["steps"]}

    def in_triton() -> tuple[Tensor, ...]:
        spare = {"spare": call.by_chunk(call.heads, call.C, call.K)}
        return _channels_in_triton(call, dfinal, kept, None, inverse, made | spare)

    return _hopper.kernels.or_in_triton(_NAME, lambda: _channels_in_gluon(call, dfinal, kept, inverse, made), in_triton)


def channels_promised(operands: tuple[Tensor | None, ...], scale: float, eps: float | None) -> tuple[Tensor, ...]:
    call = _call(operands, scale, eps)
    *grads, d_between = _channel_gradients.results(call)
    made = _reverse_walk.results(call) | _entering_states.results(call)
    return *grads, made["d_initial"], d_between, *only(made, _LEFT).values()


def _call(operands: tuple[Tensor | None, ...], scale: float, eps: float | None) -> BackwardOperands:
    do, q, k, v, g, beta = operands
    assert do is not None and q is not None and k is not None and v is not None
    return BackwardOperands(do, q, k, v, g, beta, None, scale, eps, _hopper.CHUNK)


def _heads_in_gluon(
    call: BackwardOperands, dfinal: Tensor | None, kept: Tensor, inverse: Tensor, made: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    walked, entered = _reverse_walk.results(call), _entering_states.results(call)
    made = made | walked | entered
    grads = _head_gradients.InGluon(call, made)

    def beside() -> None:
        _entering_states.in_gluon(call, kept, made, entered)
        grads.query()

    _hopper.side_by_side(
        call.v.device, lambda: _reverse_walk.in_gluon(call, dfinal, inverse, made, walked), beside
    )
    grads.others()
    return *grads.results, walked["d_initial"]


def _channels_in_gluon(
    call: BackwardOperands, dfinal: Tensor | None, kept: Tensor, inverse: Tensor, made: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    walked, entered = _reverse_walk.results(call), _entering_states.results(call)
    _hopper.side_by_side(
        call.v.device,
        lambda: _reverse_walk.in_gluon(call, dfinal, inverse, made, walked),
        lambda: _entering_states.in_triton(call, kept, None, made, entered),
    )
    made = made | walked | entered
    *grads, d_between = _channel_gradients.in_gluon(call, made)
    return *grads, walked["d_initial"], d_between, *only(made, _LEFT).values()
