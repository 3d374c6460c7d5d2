"""A call of `ssd_scan` or of its backward as the kernels read it, and what all of them take: decays, and the walk."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens, power_of_2, strides
from megacpp_compile.lowerings.ssd_scan import _triton_walk

# Channels of a head that one program of the walk has.
LANES = 64


class ScanOperands:
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
        states, last = self.walked(chunk)
        if self.empty:
            return states, last.zero_() if first is None else first.to(torch.float32, copy=True)
        length = min(chunk, _walked_at_once(self.p, self.n, self.wide))
        decay, steps = self.decay(length)
        bp = min(self.p, LANES)
        q, k = self.read_and_written(reverse)
        _triton_walk.walk(
            lambda meta: (self.p // bp, self.heads, self.batch), _walk_launch(self.n), q=q, k=k, v=v,
            decay=decay, steps=steps, **self.ends(skip, first, states, last), out=last if out is None else out,
            **self.sizes(length), per_group=self.heads // self.groups, every=chunk // length,
            kept=self.chunks_of(chunk), **strides("q", q, "btg"), **strides("k", k, "btg"), **strides("v", v, "bth"),
            P=self.p, N=self.n, BP=bp, REVERSE=int(reverse), ROWS=int(out is not None), WIDE=int(self.wide),
            **self.cuts(length),
        )  # fmt: skip
        return states, last

    def walked(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Room for the states every `chunk` tokens, and the last one."""
        states = self.new(self.batch, self.chunks_of(chunk), self.heads, self.p, self.n)
        return states, self.new(self.batch, self.heads, self.p, self.n)

    def read_and_written(self, reverse: bool) -> tuple[Tensor, Tensor]:
        """What reads a walk's state, and what is added to it with the values."""
        return (self.B, self.C) if reverse else (self.C, self.B)

    def ends(self, skip: Tensor | None, first: Tensor | None, states: Tensor, last: Tensor) -> dict[str, Any]:
        """A walk's arguments for its states, and for what goes past it. What is not there is not read."""
        return {"skip": self.A if skip is None else skip, "first": last if first is None else first.contiguous(),
                "states": states, "last": last, "skip_h": 0 if skip is None else skip.stride(0),
                "SKIP": int(skip is not None), "FIRST": int(first is not None)}  # fmt: skip


def _walked_at_once(p: int, n: int, wide: bool) -> int:
    """Tokens of a chunk of the walk."""
    return 32 if wide and n > 128 else 64


def _walk_launch(n: int) -> dict[str, int]:
    return {"num_warps": 4 if n <= 128 else 8, "num_stages": 2}
