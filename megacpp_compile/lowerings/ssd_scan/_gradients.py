"""What backward of `ssd_scan` launches behind its walks: gradients of dt, A, B, C and D, chunks side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.ssd_scan import _triton_gradients
from megacpp_compile.lowerings.ssd_scan._call import ScanOperands

# Heads of a group that a program takes one after the other: they share B, C and their GEMMs.
HEADS = 8


class ChunkGradients:
    """By chunks of `length` tokens, from the states that enter them, and the gradients of those that leave them (left).

    The scores' gradients are to be there before those of B and C, and all before those of the steps. into: memory for
    those of B and C, of their shape and dtype.
    """

    def __init__(
        self, call: ScanOperands, dy: Tensor, states: Tensor, left: Tensor, length: int,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.call, self.dy, self.states, self.left, self.length = call, dy, states, left, length
        heads, chunks = call.heads, call.chunks_of(length)
        self.per_group = heads // call.groups
        self.at_once = math.gcd(self.per_group, HEADS)
        self.parts, self.direct = heads // self.at_once, self.at_once == self.per_group
        self.d_dt = call.new(call.batch, call.tokens, heads, dtype=call.dt.dtype)
        self.into = into
        self.d_B, self.d_C = into if into is not None and self.direct else (
            call.new(call.batch, call.tokens, self.parts, call.n, dtype=t.dtype if self.direct else torch.float32)
            for t in (call.B, call.C)
        )
        by_head = (call.batch, chunks, heads)
        self.d_A, self.d_skip, self.inner = (call.new(*by_head) for _ in range(3))
        sums = (call.new(*by_head, length) for _ in range(5))
        self.row_sums, self.column_sums, self.diagonal, self.query_dots, self.key_dots = sums
        self.across: Tensor | None = None
        self.d_scores = call.new(call.batch, chunks, self.parts, length, length)
        self.decay, self.steps = call.decay(length)
        self.packed = call.cuts(length) if not call.empty else {}

    def _common(self) -> dict[str, Any]:
        call = self.call
        return {"decay": self.decay, "steps": self.steps, **call.sizes(self.length), "per_group": self.per_group,
                "parts": self.parts, "P": call.p, "N": call.n, "HB": self.at_once, "WIDE": int(call.wide),
                **self.packed}  # fmt: skip

    def _grid(self) -> Callable[[Any], tuple[Any, ...]]:
        return lambda meta: (self.call.chunks_of(self.length), self.parts, self.call.batch)

    def of_scores(self) -> None:
        call, dy = self.call, self.dy
        _triton_gradients.scores_grad(
            self._grid(), _launch(call.p, call.n, self.length), dy=dy, x=call.x, B=call.B, C=call.C,
            d_scores=self.d_scores, row_sums=self.row_sums, column_sums=self.column_sums, diagonal=self.diagonal,
            d_skip=self.d_skip, **strides("dy", dy, "bth"), **strides("x", call.x, "bth"),
            **strides("B", call.B, "btg"), **strides("C", call.C, "btg"), **self._common(),
        )  # fmt: skip

    def of_queries(self) -> None:
        self._of_group(False, self.dy, self.call.C, self.call.B, self.states, self.d_C, self.query_dots)

    def of_keys(self) -> None:
        self._of_group(True, self.call.x, self.call.B, self.call.C, self.left, self.d_B, self.key_dots)

    def _of_group(
        self, keys: bool, v: Tensor, own: Tensor, other: Tensor, reach: Tensor, out: Tensor, dots: Tensor
    ) -> None:
        _triton_gradients.group_grad(
            self._grid(), _launch(self.call.p, self.call.n, self.length), v=v, own=own, other=other,
            d_scores=self.d_scores, states=reach, entering=self.states, out=out, dots=dots, inner=self.inner,
            **strides("v", v, "bth"), **strides("own", own, "btg"), **strides("other", other, "btg"),
            **strides("out", out, "bth"), KEYS=int(keys), **self._common(),
        )  # fmt: skip

    def of_steps(self) -> None:
        call = self.call
        _triton_gradients.steps_grad(
            lambda meta: (call.chunks_of(self.length), triton.cdiv(call.heads, meta["BH"]), call.batch),
            {"BH": 16, "num_warps": 4}, row_sums=self.row_sums, column_sums=self.column_sums,
            across=self.row_sums if self.across is None else self.across, diagonal=self.diagonal,
            query_dots=self.query_dots, key_dots=self.key_dots, inner=self.inner, decay=self.decay, steps=self.steps,
            A=call.A, d_dt=self.d_dt, d_A=self.d_A, **call.sizes(self.length), A_h=call.A.stride(0), **self.packed,
            HALVES=int(self.across is not None),
        )  # fmt: skip

    def results(self) -> tuple[Tensor, ...]:
        """Gradients of dt, A, B, C and D."""
        call = self.call
        d_B, d_C = self.d_B, self.d_C
        if call.empty:
            self.d_A.zero_()
            self.d_skip.zero_()
        d_D = self.d_skip.sum((0, 1, *range(3, self.d_skip.dim())))
        if not self.direct:
            d_B, d_C = (t.unflatten(2, (call.groups, -1)).sum(3).to(like.dtype)
                        for t, like in ((d_B, call.B), (d_C, call.C)))  # fmt: skip
            if self.into is not None:
                d_B, d_C = (there.copy_(t) for there, t in zip(self.into, (d_B, d_C), strict=True))
        return self.d_dt, self.d_A.sum((0, 1)).to(call.A.dtype), d_B, d_C, d_D


def in_triton(call: ScanOperands, dy: Tensor, states: Tensor, left: Tensor, length: int) -> tuple[Tensor, ...]:
    made = ChunkGradients(call, dy, states, left, length)
    if not call.empty:
        made.of_scores()
        made.of_queries()
        made.of_keys()
        made.of_steps()
    return made.results()


def longest(p: int, n: int, wide: bool) -> int:
    """Tokens of a chunk whose tiles fit into registers and shared memory."""
    return 32 if wide and n > 128 else 128 if p <= 64 and n <= 128 and not wide else 64


def _launch(p: int, n: int, length: int) -> dict[str, int]:
    """Launch options: as many stages as shared memory holds; the largest tiles are a head's states, in float32."""
    stages = 3 if p * n <= 64 * 128 else 2 if p * n <= 128 * 128 else 1
    return {"num_warps": 8 if length >= 128 or p * n > 64 * 128 else 4, "num_stages": stages}
