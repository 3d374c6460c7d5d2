"""`ssd_scan` on CUDA in Triton: chunk by chunk, with the states that enter the chunks the only intermediate in memory.

Forward, three kernels: the decay within chunks; the states, a program going over all chunks of a head with its part of
the state in registers; the rows of y, chunks side by side. Backward goes the same ways in the other direction for the
gradients of the states and of x, then sums the scores' gradients over the heads of a group before it multiplies them
with B and C. No atomics: equal inputs give equal bits.

The kernels' chunks are at most `_longest` tokens. Longer ones of the caller's keep fewer states for backward, which
then computes those in between again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._triton_launch import power_of_2
from megacpp_compile.lowerings.ssd_scan import _triton_gradients, _triton_states

__all__ = ["ssd_scan", "ssd_scan_backward", "supports"]

HEAD_SIZES = (16, 32, 64, 128)
STATE_SIZES = (16, 32, 64, 128, 256)
# Heads of a group that a program takes one after the other: they share B, C and their products.
HEADS = 8
# Blocks a launch can have along a dimension other than the first.
MOST_BLOCKS = 65535


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    x, dt, A, B, C, D, initial_state = args[2:9] if name == "ssd_scan_backward" else args[:7]
    given = [t for t in (x, dt, A, B, C, D, initial_state) if t is not None]
    if any(t.dtype == torch.float64 for t in given):
        return "float64: tensor cores multiply in float32 at most"
    if any(not t.dtype.is_floating_point or t.dtype.itemsize < 2 for t in given):
        return "an operand is neither float32, float16 nor bfloat16"
    sizes = (*x.shape[2:], *B.shape[2:])
    if not all(isinstance(size, int) for size in sizes):
        return f"symbolic heads or head sizes: {sizes}"
    heads, p, groups, n = sizes
    if p not in HEAD_SIZES or n not in STATE_SIZES:
        return f"heads of {p} with states of {n}: kernels have {HEAD_SIZES} and {STATE_SIZES}"
    if heads > MOST_BLOCKS or isinstance(x.shape[0], int) and x.shape[0] > MOST_BLOCKS:
        return f"more than {MOST_BLOCKS} heads or sequences"
    return None


class _Call:
    """Sizes, and the operands as the kernels read them: lanes adjacent in memory, any other strides."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> None:
        self.batch, self.tokens, self.heads, self.p = x.shape
        self.groups, self.n = B.shape[2:]
        self.per_group = self.heads // self.groups
        self.x, self.B, self.C = (lanes_adjacent(t) for t in (x, B, C))
        self.dt, self.A = dt, A
        # Products of float32 operands are taken as such; of half precision, in parts that are exact (`_products`).
        self.wide = torch.float32 in (x.dtype, B.dtype, C.dtype)
        self.length = min(chunk_size, _longest(self.p, self.n, self.wide))
        if isinstance(self.tokens, int):
            self.length = min(self.length, max(power_of_2(self.tokens), 16))
        self.bm = _rows_at_once(self.length)
        self.chunks = (self.tokens + self.length - 1) // self.length
        # How many of the kernels' chunks are one of the caller's.
        self.every = 1 if statically_known_true(self.tokens <= self.length) else max(chunk_size // self.length, 1)
        self.at_once = math.gcd(self.per_group, HEADS)
        self.parts = self.heads // self.at_once
        self.empty = any(statically_known_true(size == 0) for size in (self.batch, self.tokens, self.heads))
        self.by_head = (self.batch, self.chunks, self.heads)
        self.sizes = {"tokens": self.tokens, "heads": self.heads, "chunks": self.chunks}
        self.tile = {"L": self.length, "P": self.p, "N": self.n, "WIDE": int(self.wide)}
        self.decay, self.steps = self._decay()

    def new(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def _decay(self) -> tuple[Tensor, Tensor]:
        decay, steps = (self.new(*self.by_head, self.length) for _ in range(2))
        if not self.empty:
            _triton_states.decay(
                lambda meta: (self.chunks, triton.cdiv(self.heads, meta["BH"]), self.batch),
                {"BH": 16, "num_warps": 4}, dt=self.dt, A=self.A, decay=decay, steps=steps, **self.sizes,
                **strides("dt", self.dt, "bth"), A_h=self.A.stride(0), L=self.length,
            )  # fmt: skip
        return decay, steps

    def states(self, v: Tensor, k: Tensor, first: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        """The state entering each chunk, and the last; or the gradients of those leaving, and of the first."""
        states = self.new(*self.by_head, self.p, self.n)
        last = self.new(self.batch, self.heads, self.p, self.n)
        bp, bn = min(self.p, 64), min(self.n, 64)
        if self.empty:
            return states, last.zero_() if first is None else first.to(torch.float32, copy=True)
        _triton_states.states(
            lambda meta: (self.p // bp * (self.n // bn), self.heads, self.batch),
            {"num_warps": 4, "num_stages": 2}, v=v, k=k, decay=self.decay, steps=self.steps,
            first=last if first is None else first.contiguous(), states=states, last=last, **self.sizes,
            per_group=self.per_group, **strides("v", v, "bth"), **strides("k", k, "btg"), **self.tile, BP=bp, BN=bn,
            REVERSE=int(reverse), FIRST=int(first is not None),
        )  # fmt: skip
        return states, last

    def rows(self, q: Tensor, k: Tensor, v: Tensor, states: Tensor, skip: Tensor | None, out: Tensor) -> Tensor:
        """y with (C, B, x), or the gradient of x with (B, C, gradient of y)."""
        if self.empty:
            return out
        bm = self.bm
        _triton_states.rows(
            lambda meta: (self.chunks * (self.length // bm), self.parts, self.batch),
            {"num_warps": 8 if self.length * bm >= 128 * 128 else 4, "num_stages": 1}, q=q, k=k, v=v,
            decay=self.decay, steps=self.steps, states=states, skip=self.A if skip is None else skip, out=out,
            **self.sizes, per_group=self.per_group, skip_h=0 if skip is None else skip.stride(0),
            **strides("q", q, "btg"), **strides("k", k, "btg"), **strides("v", v, "bth"), **self.tile, BM=bm,
            HB=self.at_once, REVERSE=int(q is self.B), SKIP=int(skip is not None),
        )  # fmt: skip
        return out

    def by_group(self, parts: Tensor, like: Tensor) -> Tensor:
        """Gradients of B or C, summed over what the programs of a group did."""
        if self.parts == self.groups:
            return parts
        return parts.unflatten(2, (self.groups, -1)).sum(3).to(like.dtype)


def _longest(p: int, n: int, wide: bool) -> int:
    """Tokens of a chunk whose tiles fit into registers and shared memory."""
    return 32 if wide and n > 128 else 128 if p <= 64 and n <= 128 and not wide else 64


def _rows_at_once(length: int) -> int:
    """Rows of a chunk that a program computes."""
    return length


def lanes_adjacent(t: Tensor) -> Tensor:
    return t if statically_known_true(t.stride(-1) == 1) else t.contiguous()


def strides(name: str, t: Tensor, dims: str) -> dict[str, Any]:
    return {f"{name}_{dim}": t.stride(i) for i, dim in enumerate(dims)}


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(x, dt, A, B, C, chunk_size)
    states, final = call.states(call.x, call.B, initial_state, reverse=False)
    y = call.rows(call.C, call.B, call.x, states, D, call.new(*x.shape, dtype=out_dtype))
    return y, final, states if call.every == 1 else states[:, :: call.every].contiguous()


def ssd_scan_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, dy = _Call(x, dt, A, B, C, chunk_size), lanes_adjacent(dy)
    if call.every > 1:
        states, _ = call.states(call.x, call.B, initial_state, reverse=False)
    left, d_initial = call.states(dy, call.C, dfinal, reverse=True)
    d_x = call.rows(call.B, call.C, dy, left, D, call.new(*x.shape, dtype=x.dtype))
    d_dt, d_A, d_B, d_C, d_D = _gradients(call, dy, D, states, left)
    d_D = states.new_empty(0) if D is None else d_D.to(D.dtype)
    d_initial = states.new_empty(0) if initial_state is None else d_initial.to(initial_state.dtype)
    return d_x, d_dt, d_A, d_B, d_C, d_D, d_initial


def _gradients(call: _Call, dy: Tensor, D: Tensor | None, states: Tensor, left: Tensor) -> tuple[Tensor, ...]:
    """Gradients of dt, A, B, C and D."""
    length, heads, parts = call.length, call.heads, call.parts
    bm = call.bm
    tiles = length // bm
    d_dt = call.new(call.batch, call.tokens, heads, dtype=call.dt.dtype)
    d_B, d_C = (
        call.new(call.batch, call.tokens, parts, call.n, dtype=t.dtype if parts == call.groups else torch.float32)
        for t in (call.B, call.C)
    )
    if call.empty:
        zeros = (call.new(heads, dtype=call.A.dtype).zero_(), call.new(heads).zero_())
        return d_dt, zeros[0], call.by_group(d_B, call.B), call.by_group(d_C, call.C), zeros[1]
    d_scores = call.new(call.batch, call.chunks, parts, length, length)
    column_sums = call.new(*call.by_head, tiles, length)
    row_sums, query_dots, key_dots = (call.new(*call.by_head, length) for _ in range(3))
    d_skip = call.new(call.batch, call.chunks * tiles, heads if D is not None else 0)
    inner, d_A = call.new(*call.by_head), call.new(*call.by_head)
    common = {"decay": call.decay, "steps": call.steps, **call.sizes, "per_group": call.per_group, "parts": parts,
              **call.tile, "BM": bm, "HB": call.at_once}  # fmt: skip

    def grid(meta: Any) -> tuple[Any, ...]:
        return call.chunks * tiles, parts, call.batch

    launch = {"num_warps": 8 if length * bm >= 128 * 128 else 4, "num_stages": 1}
    _triton_gradients.scores_grad(
        grid, launch, dy=dy, x=call.x, B=call.B, C=call.C, d_scores=d_scores, row_sums=row_sums,
        column_sums=column_sums, d_skip=d_skip, **strides("dy", dy, "bth"), **strides("x", call.x, "bth"),
        **strides("B", call.B, "btg"), **strides("C", call.C, "btg"), SKIP=int(D is not None), **common,
    )  # fmt: skip

    def group_grad(v: Tensor, own: Tensor, other: Tensor, reach: Tensor, out: Tensor, dots: Tensor, keys: bool) -> None:
        _triton_gradients.group_grad(
            grid, launch, v=v, own=own, other=other, d_scores=d_scores, states=reach, entering=states, out=out,
            dots=dots, inner=inner, **strides("v", v, "bth"), **strides("own", own, "btg"),
            **strides("other", other, "btg"), KEYS=int(keys), **common,
        )  # fmt: skip

    group_grad(dy, call.C, call.B, states, d_C, query_dots, False)
    group_grad(call.x, call.B, call.C, left, d_B, key_dots, True)
    _triton_gradients.steps_grad(
        lambda meta: (call.chunks, triton.cdiv(heads, meta["BH"]), call.batch), {"BH": 16, "num_warps": 4},
        row_sums=row_sums, column_sums=column_sums, query_dots=query_dots, key_dots=key_dots, inner=inner,
        decay=call.decay, steps=call.steps, A=call.A, d_dt=d_dt, d_A=d_A, **call.sizes, A_h=call.A.stride(0),
        L=length, TILES=tiles,
    )  # fmt: skip
    d_A = d_A.sum((0, 1)).to(call.A.dtype)
    return d_dt, d_A, call.by_group(d_B, call.B), call.by_group(d_C, call.C), d_skip.sum((0, 1))
