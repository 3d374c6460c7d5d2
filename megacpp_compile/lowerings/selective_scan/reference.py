"""`selective_scan` and its backward in plain PyTorch: their meaning, their CPU lowering, and the oracle.

By chunk: decays and what enters of a chunk's tokens at once, the state token by token into the memory of what enters,
and what is made of the states at once again. Backward makes a chunk's states anew from the one that enters it. No
tensor has more states than a chunk's tokens; on a CPU chunks of 32 tokens stay in its caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.xla_loop import Body, Tensors
from megacpp_compile.lowerings._op import compute_dtype

# A loop over chunks, of which there may be any number.
TRACED = False


class InTurn:
    """How a chunk's states follow one another, and chunks: one by one."""

    at_once = 32  # tokens, where chunks are multiples of that

    def __init__(self, tokens: int, chunk_size: int) -> None:
        self.tokens = tokens
        self.length = chunk_size if chunk_size % self.at_once else self.at_once

    def within(self, decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
        """The states behind each token [b, l, d, n], in the memory of `added`."""
        for i in range(added.shape[1]):
            state = added[:, i].addcmul_(decay[:, i], state)
        return added

    def carry(
        self, body: Body, carried: Tensors, tokens: Sequence[Tensor], chunks: Sequence[Tensor] = (),
        backwards: bool = False,
    ) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
        """`(carried, part) -> (carried, (results of its tokens, ..., the state))` for each chunk: (carried at last,
        results joined). tokens: [b, t, ...], cut into chunks; chunks: [b, chunks, ...], one of each."""
        starts, results = range(0, self.tokens, self.length), list[Tensors]()
        for c in reversed(range(len(starts))) if backwards else range(len(starts)):
            part = (x[:, starts[c] : starts[c] + self.length] for x in tokens)
            carried, result = body(carried, (*part, *(x[:, c] for x in chunks)))
            results.append(result)
        if backwards:
            results.reverse()
        *each, states = zip(*results, strict=True)
        return carried, [*(torch.cat(one, 1) for one in each), torch.stack(states, 1)]


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
    out_dtype: torch.dtype,
    order: type[InTurn] = InTurn,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(u, dt, A, B, C, D, initial_state)
    tokens, first, A = _prepared(u, dt, A, B, C, initial_state, wide)
    if 0 in u.shape:
        return u.new_zeros(u.shape, dtype=out_dtype), first, _no_states(u, A, chunk_size)
    turn = order(u.shape[1], chunk_size)

    def body(carried: Tensors, part: Tensors) -> tuple[Tensors, Tensors]:
        (state, A), (u, dt, B, C) = carried, part
        decay, added = _entering(u, dt, A, B)
        states = turn.within(decay, added, state)
        return (states[:, -1], A), (torch.einsum("bldn,bln->bld", states, C), state)

    (final, _), (y, states) = turn.carry(body, (first, A), tokens)
    if D is not None:
        y = y + D.to(wide) * tokens[0]
    return y.to(out_dtype), final.clone(), states[:, :: chunk_size // turn.length].contiguous()


def selective_scan_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
    chunk_size: int,
    order: type[InTurn] = InTurn,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, dt, A, B, C, D and initial_state, empty where there is none."""
    operands, wide = (u, dt, A, B, C, D, initial_state), states.dtype
    tokens, first, A = _prepared(u, dt, A, B, C, initial_state, wide)
    dy, left = dy.to(wide), torch.zeros_like(first) if dfinal is None else dfinal.to(wide, copy=True)
    skipped = None if D is None else (dy * tokens[0]).sum((0, 1))
    if 0 in u.shape:
        made: list[Tensor] = [*(torch.zeros_like(x) for x in (u, dt, A, B, C)), left]
    else:
        turn = order(u.shape[1], chunk_size)
        if turn.length < chunk_size:
            states = selective_scan(u, dt, A, B, C, None, initial_state, turn.length, wide, order)[2]
        made = _walked_back(dy, left, tokens, A, states, turn)
    if D is not None:
        made[0] = made[0] + D.to(wide) * dy
    *grads, d_initial = made
    return all_of((*grads, skipped, d_initial), operands, states)


def all_of(
    grads: Sequence[Tensor | None], operands: Sequence[Tensor | None], states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients that the op returns, empty where there is no operand."""
    made = zip(grads, operands, strict=True)
    a, b, c, d, e, f, g = (
        states.new_empty(0) if x is None or t is None else x.to(t.dtype).contiguous() for x, t in made
    )
    return a, b, c, d, e, f, g


def _walked_back(
    dy: Tensor, left: Tensor, tokens: Sequence[Tensor], A: Tensor, states: Tensor, turn: InTurn
) -> list[Tensor]:
    """Gradients of u without the skip, dt, A, B, C and the first state, from those of y and of the last state."""

    def body(carried: Tensors, part: Tensors) -> tuple[Tensors, Tensors]:
        (left, A), (dy, u, dt, B, C, state) = carried, part
        decay, added = _entering(u, dt, A, B)
        inner = turn.within(decay, added, state)
        d_C = torch.einsum("bldn,bld->bln", inner, dy)
        # The gradient of a state is what its token reads of it, and that of the next decayed to it.
        onward = torch.cat((torch.ones_like(decay[:, :1]), decay[:, 1:].flip(1)), 1)
        d_states = turn.within(onward, (dy[..., None] * C[:, :, None]).flip(1), left).flip(1)
        d_exponent = d_states * torch.cat((state[:, None], inner[:, :-1]), 1) * decay
        d_added = torch.einsum("bldn,bln->bld", d_states, B)
        d_B = torch.einsum("bldn,bld->bln", d_states, dt * u)
        d_dt = torch.einsum("bldn,dn->bld", d_exponent, A) + u * d_added
        d_A = torch.einsum("bldn,bld->dn", d_exponent, dt)
        return (decay[:, 0] * d_states[:, 0], A), (dt * d_added, d_dt, d_B, d_C, d_A[None])

    chunks = [states]
    (d_initial, _), (d_u, d_dt, d_B, d_C, d_A) = turn.carry(body, (left, A), [dy, *tokens], chunks, backwards=True)
    return [d_u, d_dt, d_A.sum((0, 1)), d_B, d_C, d_initial]


def _entering(u: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The decays, and what each token adds to the state [b, l, d, n]."""
    return (dt[..., None] * A).exp(), (dt * u)[..., None] * B[:, :, None]


def _prepared(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None, wide: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    state = u.shape[0], u.shape[2], A.shape[1]
    first = u.new_zeros(state, dtype=wide) if initial_state is None else initial_state.to(wide, copy=True)
    return [x.to(wide) for x in (u, dt, B, C)], first, A.to(wide)


def _no_states(u: Tensor, A: Tensor, chunk_size: int) -> Tensor:
    """The states of a scan in which there is nothing."""
    return A.new_zeros(u.shape[0], -(-u.shape[1] // chunk_size), u.shape[2], A.shape[1])
