"""A recurrence of a state with gates, by chunk: what the gated delta rule and gated linear attention share.

    S' = decay S + Kout^T U        O = scale (Qin S + P U)        P_ti = <q_t decay(i to t), k_i>, i <= t

with Qin (and Kin) decayed from the chunk's start and Kout to its end. U, what tokens write, is V here; the delta rule's
`Chunks` has its own. All but the state is batched over chunks; a loop over chunks carries the state.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY, ChunkGrid, segments_bound
from megacpp_compile.lowerings._kernels.decays import BLOCK, ChannelDecay, HeadDecay
from megacpp_compile.lowerings._kernels.xla_loop import Tensors, loop

# Tokens of a chunk that an op may be asked for.
CHUNK_SIZES = (16, 32, 64)


def not_few(tokens: Any, most: int, cu_seqlens: Tensor | None) -> str | None:
    """Why a lowering for at most so many tokens of whole sequences cannot serve a call, or None."""
    if cu_seqlens is not None:
        return "packed documents"
    known = isinstance(tokens, int) and 0 < tokens <= most
    return None if known else f"more than {most} tokens, none, or a number of them that is not known"


def operand_problem(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int
) -> str | None:
    """What is wrong with an op's operands, in words."""
    if q.dim() != 4 or v.dim() != 4 or q.shape[2:] != k.shape[2:]:
        return f"q, k and v are {[tuple(t.shape) for t in (q, k, v)]}: [b, t, hk, k] twice, and [b, t, hv, v]"
    if v.shape[2] % q.shape[2]:
        return f"{v.shape[2]} value heads are no multiple of {q.shape[2]} key heads"
    if g is not None and g.dim() == 4 and g.shape[3] != q.shape[3]:
        return f"g has {g.shape[3]} channels, keys have {q.shape[3]}"
    if cu_seqlens is not None and q.shape[0] != 1:
        return f"cu_seqlens goes with one row of tokens, not with {q.shape[0]}"
    if chunk_size not in CHUNK_SIZES:
        return f"chunk_size is {chunk_size}, not one of {CHUNK_SIZES}"
    return None


class GatedChunkGradients(NamedTuple):
    """By chunk, [b, c, h, l, ...], but `gates` [b, t, hv, 1 or k], and `initial` [n, h, k, v]. others: of what
    an op has beyond these."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    initial: Tensor
    others: Tensors


class GatedChunks:
    """The operands by chunk, [b, c, h, l, ...], in `dtype`: c chunks of l tokens, padded with tokens that change
    nothing. `per_head`, `per_channel`: how decays are computed."""

    per_head: type[HeadDecay] = HeadDecay
    per_channel: type[HeadDecay] = ChannelDecay

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None,
        cu_seqlens: Tensor | None, chunk_size: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.dtype, self.key_heads, self.shared = dtype, q.shape[2], v.shape[2] // max(q.shape[2], 1)
        length = min(chunk_size, BLOCK * max(1, -(-q.shape[1] // BLOCK)))
        self.grid = ChunkGrid(q.shape[1], length, cu_seqlens)
        self.kept = segments_bound(q.shape[1], chunk_size, cu_seqlens)
        self.q, self.k = (self._by_value_head(self.grid.split(x.to(dtype))) for x in (q, k))
        self.v, self.gated = self.grid.split(v.to(dtype)), g is not None
        self.decay = self._decay(g)
        self.k_in, self.q_in = self.k * self.decay.into, self.q * self.decay.into
        self.k_out = self.k * self.decay.out
        self.scores = self.decay.scores(self._rows(), self.k)  # [1 or 2, b, c, h, l, l]
        self.P = self.scores[-1]
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = (sequences, v.shape[2], q.shape[3], v.shape[3])
        self.initial = q.new_zeros(state, dtype=dtype) if initial_state is None else initial_state.to(dtype)

    def _decay(self, g: Tensor | None) -> HeadDecay:
        if g is None:
            return self.per_head(self.k.new_zeros((*self.k.shape[:-1], 1)))
        gates = self.grid.split(g.to(self.dtype))
        return self.per_channel(gates) if g.dim() == 4 else self.per_head(gates.unsqueeze(-1))

    # What an op says of itself: the rows that meet keys, what is written, and the way back.

    def _rows(self) -> Tensor:
        return self.q.unsqueeze(0)

    def _written_from(self) -> Tensors:
        """What `write` needs beside the states, each [b, c, h, ...]."""
        return (self.v,)

    @staticmethod
    def write(states: Tensor, v: Tensor) -> Tensor:
        return v

    @staticmethod
    def write_backward(d_written: Tensor, *of: Tensor) -> Tensor | int:
        """The gradient of the states for that of what `write` made of them."""
        return 0

    def _gradients_within(
        self, d_written: Tensor, d_P: Tensor, written: Tensor, entered: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensors]:
        """Gradients of v, `scores` and `k_in`, and of what else the op has."""
        return d_written, d_P.unsqueeze(0), None, ()

    # Across chunks.

    def _by_chunk(self, outside: Tensor, where: str, parts: Tensors) -> Tensors:
        """`parts` for a loop, [c, b, ...], behind what is needed to take states from outside in."""
        parts = tuple(x.transpose(0, 1) for x in parts)
        if not self.grid.packed:
            return parts
        taken = getattr(self.grid, where)[:, None, None, None, None]  # [c, 1, 1, 1, 1]
        return taken, outside[self.grid.document].unsqueeze(1), *parts

    def _walked(self, body: Any, outside: Tensor, parts: Tensors, backward: bool) -> tuple[Tensor, Tensor]:
        """[b, c, h, k, v], what goes into each chunk, and [n, h, k, v], what a walk leaves of each sequence."""
        grid = self.grid
        if not grid.chunks:
            return outside.new_zeros((self.v.shape[0], 0, *outside.shape[1:])), _copied(outside)
        body = functools.partial(body, packed=grid.packed)
        parts = tuple(x.flip(0) for x in parts) if backward else parts
        (last,), results = loop(body, (grid.begin(outside),), parts)
        results = tuple((x.flip(0) if backward else x).transpose(0, 1) for x in results)
        return results[0], _copied(grid.end(results[1], outside, backward) if grid.packed else last)

    def forward(self, scale: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """o, the final state, and the states kept."""
        body = functools.partial(_step, write=type(self).write)
        parts = self._by_chunk(self.initial, "starts", (self.decay.total, self.k_out, *self._written_from()))
        entered, final = self._walked(body, self.initial, parts, backward=False)
        written = self.write(entered, *self._written_from())
        o = self.grid.join(scale * (self.q_in @ entered + self.P @ written))
        kept = entered[:, ::STATES_EVERY]
        if self.grid.packed:  # a chunk that is not there is entered by what left the one before
            kept = torch.where(self.grid.valid[::STATES_EVERY, 0, None, None, None], kept, 0)
        unused = self.kept - kept.shape[1]
        kept = F.pad(kept, (0, 0) * 3 + (0, unused)) if unused else kept
        return o.to(out_dtype).contiguous(), final, kept.clone(memory_format=torch.contiguous_format)

    def entering(self, kept: Tensor) -> Tensor:
        """[b, c, h, k, v]: the states that enter all chunks, from those that enter every `STATES_EVERY`th."""
        state, every = kept, []
        for i in range(min(STATES_EVERY, self.grid.chunks)):
            at = slice(i, None, STATES_EVERY)
            total, k_out, *of = (x[:, at] for x in (self.decay.total, self.k_out, *self._written_from()))
            state = state[:, : total.shape[1]]
            state = self.grid.restarted(state, self.initial, at) if i else state
            every.append(F.pad(state, (0, 0) * 3 + (0, kept.shape[1] - state.shape[1])))
            state = total * state + k_out.transpose(-1, -2) @ self.write(state, *of)
        if not every:
            return kept[:, :0]
        return torch.stack(every, 2).flatten(1, 2)[:, : self.grid.chunks]

    def backward(self, do: Tensor, dfinal: Tensor | None, kept: Tensor, scale: float) -> GatedChunkGradients:
        """Everything within a chunk is recomputed from the operands."""
        last = torch.zeros_like(self.initial) if dfinal is None else dfinal.to(self.dtype)
        entered = self.entering(kept)
        written = self.write(entered, *self._written_from())
        do = self.grid.split(do.to(self.dtype) * scale)

        # Across chunks: the gradients of the states that leave them.
        d_written, read = self.P.transpose(-1, -2) @ do, self.q_in.transpose(-1, -2) @ do
        parts = (self.decay.total, self.k_out, read, d_written, *self._written_from())
        body = functools.partial(_step_backward, write_backward=type(self).write_backward)
        left, d_initial = self._walked(body, last, self._by_chunk(last, "stops", parts), backward=True)

        # Within a chunk: what is written, then the scores, then what enters and leaves.
        d_written = d_written + self.k_out @ left
        d_P = (do @ written.transpose(-1, -2)).tril()
        d_v, d_scores, d_k_in, others = self._gradients_within(d_written, d_P, written, entered)
        d_rows, d_k, d_gates = self.decay.scores_backward(d_scores, self._rows(), self.k)
        d_q_in, d_k_out = do @ entered.transpose(-1, -2), written @ left.transpose(-1, -2)
        d_q = d_rows[-1] + d_q_in * self.decay.into
        d_k = d_k + d_k_out * self.decay.out
        if d_k_in is not None:
            d_k = d_k + d_rows[0] + d_k_in * self.decay.into
        if not self.gated:
            return GatedChunkGradients(d_q, d_k, d_v, None, d_initial, others)
        d_into, d_out = self.decay.dot(self.q_in, d_q_in), self.decay.dot(self.k_out, d_k_out)
        d_into = d_into if d_k_in is None else d_into + self.decay.dot(self.k_in, d_k_in)
        d_total = self.decay.state_dot(entered, left)
        gates = self.grid.join(d_gates + self.decay.gates_gradient(d_into, d_out, d_total))
        return GatedChunkGradients(d_q, d_k, d_v, gates, d_initial, others)

    def _by_value_head(self, x: Tensor) -> Tensor:
        """[b, c, hk, l, k] -> [b, c, hv, l, k]."""
        return x.unsqueeze(3).expand(-1, -1, -1, self.shared, -1, -1).flatten(2, 3)

    def by_key_head(self, x: Tensor) -> Tensor:
        """[b, c, hv, l, k] -> [b, t, hk, value heads of one, k]."""
        return self.grid.join(x).unflatten(2, (self.key_heads, self.shared))


def _copied(state: Tensor) -> Tensor:
    """In rows, whatever strides the operands have."""
    return state.clone(memory_format=torch.contiguous_format)


def _step(carried: Tensors, part: Tensors, write: Any, packed: bool) -> tuple[Tensors, Tensors]:
    (state,) = carried
    if packed:
        starts, outside, *part = part  # type: ignore[assignment]
        state = torch.where(starts, outside, state)
    total, k_out, *of = part
    left = total * state + k_out.transpose(-1, -2) @ write(state, *of)
    return (left,), (state, left) if packed else (state,)


def _step_backward(carried: Tensors, part: Tensors, write_backward: Any, packed: bool) -> tuple[Tensors, Tensors]:
    """The gradient of the state that enters a chunk, for that of the one that leaves it."""
    (d_state,) = carried
    if packed:
        stops, outside, *part = part  # type: ignore[assignment]
        d_state = torch.where(stops, outside, d_state)
    total, k_out, read, d_written, *of = part
    into = read + total * d_state + write_backward(d_written + k_out @ d_state, *of)
    return (into,), (d_state, into) if packed else (d_state,)
