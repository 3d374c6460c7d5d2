"""`ssd_scan` on CUDA in Triton: chunk by chunk, with the states that enter the chunks the only intermediate in memory.

Forward is one walk over the chunks of a head, its state in registers (behind a pass over the steps): y, and a state in
memory every `chunk_size` tokens. Backward walks the other way for the gradients of the states and of x. Then, chunks
side by side, the scores' gradients are summed over the heads of a group before B and C multiply them, and what the
decays are due is summed from behind. No atomics: equal inputs give equal bits.

Documents are counted within each chunk first (`ssd_cuts`), 4 bytes a token for all heads. Where the counts of two
tokens differ, the logarithm of the decay between them is -inf. Without documents the kernels' code has none of this.

Those last kernels' chunks are at most `_longest` tokens. Where the caller's are longer, fewer states are kept, and
backward walks forward once more for those in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens, power_of_2, strides
from megacpp_compile.lowerings.ssd_scan import _triton_gradients, _triton_walk

__all__ = ["ssd_scan", "ssd_scan_backward", "supports"]

HEAD_SIZES = (16, 32, 64, 128)
STATE_SIZES = (16, 32, 64, 128, 256)
# Heads of a group that a program takes one after the other: they share B, C and their GEMMs.
HEADS = 8
# Channels of a head that one program of the walk has.
LANES = 64
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
    """Sizes, and the operands as the kernels read them: channels contiguous in memory, rows in sixteens."""

    def __init__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, seq_idx: Tensor | None
    ) -> None:
        self.batch, self.tokens, self.heads, self.p = x.shape
        self.groups, self.n = B.shape[2:]
        self.x, self.B, self.C = (in_sixteens(t) for t in (x, B, C))
        self.dt, self.A, self.seq_idx = dt, A, seq_idx
        # GEMMs of float32 operands are taken as such; of half precision, in exact parts (`_triton_gemms`).
        self.wide = torch.float32 in (x.dtype, B.dtype, C.dtype)
        if isinstance(self.tokens, int):
            chunk_size = min(chunk_size, max(power_of_2(self.tokens), 16))
        self.chunk = chunk_size
        self.empty = any(statically_known_true(size == 0) for size in (self.batch, self.tokens, self.heads))

    def new(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def chunks_of(self, length: int) -> Any:
        return (self.tokens + length - 1) // length

    def sizes(self, length: int) -> dict[str, Any]:
        return {"tokens": self.tokens, "heads": self.heads, "chunks": self.chunks_of(length), "L": length}

    def decay(self, length: int) -> tuple[Tensor, Tensor]:
        """The decay within chunks of that length, and the steps."""
        decay, steps = (self.new(self.batch, self.chunks_of(length), self.heads, length) for _ in range(2))
        if not self.empty:
            _triton_walk.decay(
                lambda meta: (self.chunks_of(length), triton.cdiv(self.heads, meta["BH"]), self.batch),
                {"BH": 16, "num_warps": 4}, dt=self.dt, A=self.A, decay=decay, steps=steps, **self.sizes(length),
                **strides("dt", self.dt, "bth"), A_h=self.A.stride(0),
            )  # fmt: skip
        return decay, steps

    def cuts(self, length: int) -> dict[str, Any]:
        """The arguments by which kernels tell documents apart; without any these are constants to Triton."""
        if self.seq_idx is None:
            return {"cuts": None, "PACKED": 0}
        cuts = self.new(self.batch, self.chunks_of(length), length, dtype=torch.int32)
        _triton_walk.cuts(
            lambda meta: (self.chunks_of(length), self.batch), {"num_warps": 1}, seq_idx=self.seq_idx, cuts=cuts,
            tokens=self.tokens, chunks=self.chunks_of(length), **strides("seq", self.seq_idx, "bt"), L=length,
        )  # fmt: skip
        return {"cuts": cuts, "PACKED": 1}

    def walk(
        self, v: Tensor, skip: Tensor | None, first: Tensor | None, chunk: int, out: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        """Writes y (v = x) or, in reverse, the gradient of x (v = that of y) to `out` if it is given.

        Returns the state entering each chunk, and the final one; or the gradients of those leaving, and of the first.
        """
        q, k = (self.B, self.C) if reverse else (self.C, self.B)
        length = min(chunk, _walked_at_once(self.p, self.n, self.wide))
        states = self.new(self.batch, self.chunks_of(chunk), self.heads, self.p, self.n)
        last = self.new(self.batch, self.heads, self.p, self.n)
        if self.empty:
            return states, last.zero_() if first is None else first.to(torch.float32, copy=True)
        decay, steps = self.decay(length)
        bp = min(self.p, LANES)
        _triton_walk.walk(
            lambda meta: (self.p // bp, self.heads, self.batch), _walk_launch(self.n), q=q, k=k, v=v,
            decay=decay, steps=steps, skip=self.A if skip is None else skip,
            first=last if first is None else first.contiguous(), out=last if out is None else out, states=states,
            last=last, **self.sizes(length), per_group=self.heads // self.groups, every=chunk // length,
            kept=self.chunks_of(chunk), skip_h=0 if skip is None else skip.stride(0), **strides("q", q, "btg"),
            **strides("k", k, "btg"), **strides("v", v, "bth"), P=self.p, N=self.n, BP=bp,
            REVERSE=int(reverse), SKIP=int(skip is not None), FIRST=int(first is not None),
            ROWS=int(out is not None), WIDE=int(self.wide), **self.cuts(length),
        )  # fmt: skip
        return states, last


def _walked_at_once(p: int, n: int, wide: bool) -> int:
    """Tokens of a chunk of the walk."""
    return 32 if wide and n > 128 else 64


def _longest(p: int, n: int, wide: bool) -> int:
    """Tokens of a chunk whose tiles fit into registers and shared memory."""
    return 32 if wide and n > 128 else 128 if p <= 64 and n <= 128 and not wide else 64


def _walk_launch(n: int) -> dict[str, int]:
    return {"num_warps": 4 if n <= 128 else 8, "num_stages": 2}


def _group_launch(p: int, n: int, length: int) -> dict[str, int]:
    """Launch options: as many stages as shared memory holds; the largest tiles are a head's states, in float32."""
    stages = 3 if p * n <= 64 * 128 else 2 if p * n <= 128 * 128 else 1
    return {"num_warps": 8 if length >= 128 or p * n > 64 * 128 else 4, "num_stages": stages}


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
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(x, dt, A, B, C, chunk_size, seq_idx)
    y = call.new(*x.shape, dtype=out_dtype)
    states, final = call.walk(call.x, D, initial_state, call.chunk, y, reverse=False)
    return y, final, states


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
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, dy = _Call(x, dt, A, B, C, chunk_size, seq_idx), in_sixteens(dy)
    chunk = min(call.chunk, _longest(call.p, call.n, call.wide))
    if chunk < call.chunk:
        states, _ = call.walk(call.x, None, initial_state, chunk, None, reverse=False)
    d_x = call.new(*x.shape, dtype=x.dtype)
    left, d_initial = call.walk(dy, D, dfinal, chunk, d_x, reverse=True)
    d_dt, d_A, d_B, d_C, d_D = _gradients(call, dy, D, states.contiguous(), left, chunk)
    d_D = states.new_empty(0) if D is None else d_D.to(D.dtype)
    d_initial = states.new_empty(0) if initial_state is None else d_initial.to(initial_state.dtype)
    return d_x, d_dt, d_A, d_B, d_C, d_D, d_initial


def _gradients(
    call: _Call, dy: Tensor, D: Tensor | None, states: Tensor, left: Tensor, length: int
) -> tuple[Tensor, ...]:
    """Gradients of dt, A, B, C and D, by chunks of `length` tokens."""
    heads, per_group = call.heads, call.heads // call.groups
    at_once = math.gcd(per_group, HEADS)
    parts, direct = heads // at_once, at_once == per_group
    d_dt = call.new(call.batch, call.tokens, heads, dtype=call.dt.dtype)
    d_B, d_C = (
        call.new(call.batch, call.tokens, parts, call.n, dtype=t.dtype if direct else torch.float32)
        for t in (call.B, call.C)
    )
    by_head = (call.batch, call.chunks_of(length), heads)
    if call.empty:
        d_A, d_skip = call.new(*by_head).zero_(), call.new(*by_head).zero_()
    else:
        row_sums, column_sums, diagonal, query_dots, key_dots = (call.new(*by_head, length) for _ in range(5))
        d_scores = call.new(*by_head[:2], parts, length, length)
        d_skip, inner, d_A = (call.new(*by_head) for _ in range(3))
        decay, steps = call.decay(length)
        packed = call.cuts(length)
        common = {"decay": decay, "steps": steps, **call.sizes(length), "per_group": per_group, "parts": parts,
                  "P": call.p, "N": call.n, "HB": at_once, "WIDE": int(call.wide), **packed}  # fmt: skip

        launch = _group_launch(call.p, call.n, length)

        def grid(meta: Any) -> tuple[Any, ...]:
            return call.chunks_of(length), parts, call.batch

        _triton_gradients.scores_grad(
            grid, launch, dy=dy, x=call.x, B=call.B, C=call.C, d_scores=d_scores, row_sums=row_sums,
            column_sums=column_sums, diagonal=diagonal, d_skip=d_skip, **strides("dy", dy, "bth"),
            **strides("x", call.x, "bth"), **strides("B", call.B, "btg"), **strides("C", call.C, "btg"),
            **common,
        )  # fmt: skip
        for keys, v, own, other, reach, out, dots in (
            (False, dy, call.C, call.B, states, d_C, query_dots),
            (True, call.x, call.B, call.C, left, d_B, key_dots),
        ):
            _triton_gradients.group_grad(
                grid, launch, v=v, own=own, other=other, d_scores=d_scores, states=reach, entering=states, out=out,
                dots=dots, inner=inner, **strides("v", v, "bth"), **strides("own", own, "btg"),
                **strides("other", other, "btg"), KEYS=int(keys), **common,
            )  # fmt: skip
        _triton_gradients.steps_grad(
            lambda meta: (call.chunks_of(length), triton.cdiv(heads, meta["BH"]), call.batch),
            {"BH": 16, "num_warps": 4}, row_sums=row_sums, column_sums=column_sums, diagonal=diagonal,
            query_dots=query_dots, key_dots=key_dots, inner=inner, decay=decay, steps=steps, A=call.A, d_dt=d_dt,
            d_A=d_A, **call.sizes(length), A_h=call.A.stride(0), **packed,
        )  # fmt: skip
    if not direct:
        d_B, d_C = (t.unflatten(2, (call.groups, -1)).sum(3).to(like.dtype)
                    for t, like in ((d_B, call.B), (d_C, call.C)))  # fmt: skip
    return d_dt, d_A.sum((0, 1)).to(call.A.dtype), d_B, d_C, d_skip.sum((0, 1))
