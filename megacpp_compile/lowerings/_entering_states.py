"""`megacpp::entering_states`: the state that enters each rank's pieces of a sequence, from what all pieces make of it.

    state    [b * pieces, ...], any floating dtype: what a piece leaves of a state of zeros
    decay    what it leaves of a state that enters: a factor of the same number of dimensions that broadcasts to state,
             or with `matrix` [b * pieces, h, k, k] for states [b * pieces, h, k, v]; None where nothing is left
    places   the place in the sequence of each rank's pieces, rank by rank; mine: those of this rank's pieces
    group    the name of the process group
    returns  the state that enters each of this rank's pieces, like state, zeros for the first of the sequence; decays,
             those of all pieces, for backward

    S_0 = 0;    S_i+1 = decay_i * S_i + state_i, or decay_i @ S_i + state_i

One all-gather forward, of states and decays, and one backward, of the states' gradients. All ranks call it with equal
shapes. Each rank goes through the pieces before its own, and backward those after: a multiplication and a sum each.
Source: the sequence parallelism of linear attention, https://arxiv.org/abs/2404.02882.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from megacpp_compile._torch.ops import collectives
from megacpp_compile.lowerings._op import no_autocast
from megacpp_compile.lowerings._traits import OpTraits, declare


@torch.library.custom_op("megacpp::entering_states", mutates_args=())
def _entering_states(
    state: Tensor, decay: Optional[Tensor], matrix: bool, places: Sequence[int], mine: Sequence[int],  # noqa: UP045
    group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with no_autocast(state):
        sent = [state] if decay is None else [state, decay.to(state.dtype)]
        states, *decays = _of_all_pieces(sent, places, mine, group)
        entering, found = torch.zeros_like(states[0]), {}
        for place, slot in enumerate(_in_order(places)):
            if place in mine:
                found[place] = entering
            entering = states[slot] + (_left(decays[0][slot], entering, matrix) if decays else 0)
        kept = decays[0].contiguous() if decays else state.new_empty(0)
        return _joined([found[place] for place in mine]), kept


@_entering_states.register_fake
def _(state, decay, matrix, places, mine, group):  # type: ignore[no-untyped-def]
    made = torch.empty_like(state, memory_format=torch.contiguous_format)
    if decay is None:
        return made, state.new_empty(0)
    of_piece = (decay.shape[0] // len(mine), *decay.shape[1:])
    return made, state.new_empty((len(places), *of_piece))


@torch.library.custom_op("megacpp::entering_states_backward", mutates_args=())
def _entering_states_backward(
    grad: Tensor, entered: Tensor, decays: Tensor, forgets: bool, matrix: bool, places: Sequence[int],
    mine: Sequence[int], group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of state and, unless it `forgets`, of decay."""
    with no_autocast(grad):
        (grads,) = _of_all_pieces([grad], places, mine, group)
        entered_of = dict(zip(mine, entered.unflatten(0, (-1, len(mine))).unbind(1), strict=True))
        left, found = torch.zeros_like(grads[0]), {}  # of the state that leaves a piece
        for place, slot in reversed(list(enumerate(_in_order(places)))):
            if place in mine:
                shape = None if forgets else decays.shape[1:]
                found[place] = left, _factor_gradient(left, entered_of[place], matrix, shape)
            left = grads[slot] + (0 if forgets else _left(decays[slot], left, matrix, backward=True))
        d_state, d_decay = zip(*(found[place] for place in mine), strict=True)
        return _joined(d_state), grad.new_empty(0) if forgets else _joined(d_decay)


@_entering_states_backward.register_fake
def _(grad, entered, decays, forgets, matrix, places, mine, group):  # type: ignore[no-untyped-def]
    made = torch.empty_like(grad, memory_format=torch.contiguous_format)
    if forgets:
        return made, grad.new_empty(0)
    return made, grad.new_empty((decays.shape[1] * len(mine), *decays.shape[2:]))


def _of_all_pieces(sent: Sequence[Tensor], places: Sequence[int], mine: Sequence[int], group: str) -> list[Tensor]:
    """Each of `sent` [b * pieces, ...] of all ranks, [all pieces, b, ...] rank by rank, in one message."""
    by_piece = [t.unflatten(0, (-1, len(mine))).movedim(1, 0) for t in sent]
    rows = torch.cat([t.reshape(len(mine), -1) for t in by_piece], 1)
    ranks = len(places) // len(mine)
    gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(rows.flatten(), ranks, group))
    parts = gathered.view(len(places), -1).split([t[0].numel() for t in by_piece], 1)
    return [part.unflatten(1, t.shape[1:]) for part, t in zip(parts, by_piece, strict=True)]


def _in_order(places: Sequence[int]) -> list[int]:
    return sorted(range(len(places)), key=lambda slot: places[slot])


def _left(decay: Tensor, state: Tensor, matrix: bool, backward: bool = False) -> Tensor:
    if not matrix:
        return decay * state
    return (decay.transpose(-1, -2) if backward else decay) @ state


def _factor_gradient(left: Tensor, entered: Tensor, matrix: bool, shape: Any) -> Tensor | None:
    if shape is None:
        return None
    return left @ entered.transpose(-1, -2) if matrix else (left * entered).sum_to_size(shape)


def _joined(of_pieces: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(of_pieces), 1).flatten(0, 1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, decay, *ctx.settings = inputs
    ctx.decay_dtype = None if decay is None else decay.dtype
    entering, decays = output
    ctx.mark_non_differentiable(decays)
    ctx.save_for_backward(entering, decays)


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    forgets = ctx.decay_dtype is None
    backward = torch.ops.megacpp.entering_states_backward.default
    d_state, d_decay = backward(grad.contiguous(), *ctx.saved_tensors, forgets, *ctx.settings)
    return d_state, None if forgets else d_decay.to(ctx.decay_dtype), None, None, None, None


_entering_states.register_autograd(_gradient, setup_context=_keep)
declare({"megacpp::entering_states": OpTraits(recomputable=False),
         "megacpp::entering_states_backward": OpTraits(recomputable=False)})  # fmt: skip
entering_states = torch.ops.megacpp.entering_states.default
