"""`selective_scan` on CUDA in Triton: chunks side by side, each walked by programs of one warp with its states in
registers.

Forward walks every chunk twice: from nothing, for what it adds to the state (`selective_ends`), and, once the states
that enter are carried from chunk to chunk (`selective_carry`), for y. Backward does the same with the gradients of
states, from the last token, and then walks every chunk for the gradients of the operands. Gradients of B and C are sums
over all channels: a program's over its own, one part after another in its own memory, and torch's over the programs. No
atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.triton_launch import MOST_BLOCKS, last_dim_contiguous, power_of_2, strides
from megacpp_compile.lowerings.selective_scan import _triton_gradients, _triton_walk
from megacpp_compile.lowerings.selective_scan.reference import all_of

__all__ = ["selective_scan", "selective_scan_backward", "supports"]

MOST_STATES = 64
# Numbers of a state that a program has: channels times states; in backward fewer, as it has them for `KEPT` tokens.
FORWARD, BACKWARD = 1024, 256
KEPT = 4
# Programs of backward that a GPU runs at once, or nearly; parts of the gradients of B and C.
AT_ONCE, PARTS = 2048, 64
ONE_WARP = {"num_warps": 1, "num_stages": 1}


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    operands = args[2:9] if name == "selective_scan_backward" else args[:7]
    given = [t for t in operands if t is not None]
    if any(t.dtype == torch.float64 for t in given):
        return "float64: states are float32"
    if any(not t.dtype.is_floating_point or t.dtype.itemsize < 2 for t in given):
        return "an operand is neither float32, float16 nor bfloat16"
    if not all(isinstance(size, int) for size in operands[2].shape):
        return f"symbolic channels or states: {tuple(operands[2].shape)}"
    if operands[2].shape[1] > MOST_STATES:
        return f"{operands[2].shape[1]} states of a channel: kernels have {MOST_STATES} at most"
    batch, tokens, _ = operands[0].shape
    chunk = args[10 if name == "selective_scan_backward" else 7]
    if any(isinstance(n, int) and n > MOST_BLOCKS for n in (batch, tokens // chunk)):
        return f"more than {MOST_BLOCKS} sequences or chunks"
    return None


def _rows(t: Tensor) -> Tensor:
    """`t`, or a copy, with its last dimension contiguous and a known step from token to token: kernels are compiled for
    it, so that addresses of several tokens are one and constants."""
    return last_dim_contiguous(t if isinstance(t.stride(-2), int) else t.contiguous())


class _Call:
    """Sizes, and the operands as the kernels read them: channels and states contiguous in memory."""

    def __init__(self, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, numbers: int) -> None:
        (self.batch, self.tokens, self.channels), self.n = u.shape, A.shape[1]
        self.u, self.dt, self.B, self.C = (_rows(t) for t in (u, dt, B, C))
        self.A, self.chunk = _rows(A), chunk_size
        self.chunks = (self.tokens + chunk_size - 1) // chunk_size
        self.bn = power_of_2(max(self.n, 1))
        self.bd = max(1, numbers // self.bn)
        self.empty = any(statically_known_true(size == 0) for size in (*u.shape, self.n))

    def new(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.u.device)

    def states(self) -> Tensor:
        return self.new(self.batch, self.chunks, self.channels, self.n)

    def sizes(self) -> dict[str, Any]:
        return {"channels": self.channels, "N": self.n, "chunks": self.chunks, "A": self.A, "A_d": self.A.stride(0),
                "A_n": self.A.stride(1), "BD": self.bd, "BN": self.bn}  # fmt: skip

    def carried(self, v: Tensor, rows: Tensor, first: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        """(the states that enter chunks, the last one), or in reverse the gradients of those that leave, and of the
        first. v, rows: what is added to a state is their outer product."""
        ends, sums, states = self.states(), self.new(self.batch, self.chunks, self.channels), self.states()
        last = self.new(self.batch, self.channels, self.n)
        blocks = triton.cdiv(self.channels, self.bd)
        _triton_walk.ends(
            lambda meta: (blocks, self.chunks, self.batch), ONE_WARP, v=v, dt=self.dt, R=rows, ends=ends, sums=sums,
            tokens=self.tokens, **self.sizes(), **strides("v", v, "bt"), **strides("dt", self.dt, "bt"),
            **strides("R", rows, "bt"), L=self.chunk, REVERSE=int(reverse),
        )  # fmt: skip
        _triton_walk.carry(
            lambda meta: (blocks, self.batch), ONE_WARP, ends=ends, sums=sums, first=last if first is None else first,
            states=states, last=last, **self.sizes(), **strides("first", last if first is None else first, "bdn"),
            REVERSE=int(reverse), FIRST=int(first is not None),
        )  # fmt: skip
        return states, last

    def operands(self, D: Tensor | None) -> dict[str, Any]:
        """Those of a kernel that has all of them."""
        each = {"u": self.u, "dt": self.dt, "B": self.B, "C": self.C}
        steps = {step: size for name, t in each.items() for step, size in strides(name, t, "bt").items()}
        skip = {"D": self.A if D is None else D, "D_d": 0 if D is None else D.stride(0), "SKIP": int(D is not None)}
        return {**each, **steps, **skip, "tokens": self.tokens, "L": self.chunk, **self.sizes()}


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
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(u, dt, A, B, C, chunk_size, FORWARD)
    y = call.new(*u.shape, dtype=out_dtype)
    if call.empty:
        last = call.new(call.batch, call.channels, call.n).zero_()
        return y.zero_(), last if initial_state is None else last + initial_state, call.states().zero_()
    states, last = call.carried(call.u, call.B, initial_state, reverse=False)
    blocks = triton.cdiv(call.channels, call.bd)
    _triton_walk.rows(
        lambda meta: (blocks, call.chunks, call.batch), ONE_WARP, **call.operands(D), states=states, y=y
    )
    return y, last, states


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, operands = _Call(u, dt, A, B, C, chunk_size, BACKWARD), (u, dt, A, B, C, D, initial_state)
    if call.empty:
        grads = [None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in operands]
        if initial_state is not None and dfinal is not None:
            grads[-1] = dfinal.to(initial_state.dtype, copy=True)
        return all_of(grads, operands, states)
    dy = _rows(dy)
    left, d_initial = call.carried(dy, call.C, dfinal, reverse=True)
    blocks = triton.cdiv(call.channels, call.bd)
    each = triton.cdiv(blocks, PARTS)
    groups = triton.cdiv(blocks, each)
    kept = min(KEPT, power_of_2(chunk_size))
    items = call.batch * call.chunks * groups
    programs = min(items, AT_ONCE) if isinstance(items, int) else AT_ONCE
    du, d_dt = (call.new(*u.shape, dtype=x.dtype) for x in (u, dt))
    dA, dD = call.states(), call.new(call.batch, call.chunks, call.channels)
    dB, dC = (call.new(call.batch, groups, call.tokens, call.n) for _ in range(2))
    inner = -(-chunk_size // kept)
    _triton_gradients.gradients(
        lambda meta: (programs,), ONE_WARP, dy=dy, **call.operands(D), states=states, left=left,
        kept=call.new(programs, inner, call.bd, call.bn), du=du, d_dt=d_dt, dA=dA, dB=dB, dC=dC, dD=dD, groups=groups,
        items=items, **strides("dy", dy, "bt"), K=kept, EACH=each,
    )  # fmt: skip
    sums = dA.sum((0, 1)), dB.sum(1), dC.sum(1), dD.sum((0, 1)) if D is not None else None
    return all_of((du, d_dt, *sums, d_initial), operands, states)
