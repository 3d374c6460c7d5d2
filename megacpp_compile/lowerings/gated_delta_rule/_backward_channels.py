"""What backward of `gated_delta_rule` has of its own for gates a channel: what no state enters, and the gradients.

Chunks by cuts have kernels of `_triton_backward_channels`; mild ones those of the rule without gates, and of
`_triton_mild_gradients`. All are launched for all chunks and leave those of the other kind alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import (
    _triton_backward_channels,
    _triton_mild_gradients,
    _triton_states,
)
from megacpp_compile.lowerings.gated_delta_rule._backward_call import Call, only, prepare_args, prepared
from megacpp_compile.lowerings.gated_delta_rule._mild_chunks import MildChunks

# Rows of a chunk that the last kernel's loop has unrolled.
ROWS = 8
NARROW, BROAD = {"num_warps": 4, "num_stages": 1}, {"num_warps": 8, "num_stages": 1}


class GatesAChannel:
    """Of a call."""

    def __init__(self, call: Call) -> None:
        assert call.g is not None
        self.call, self.g = call, call.g
        places = call.packed.chunks if call.packed else call.nothing
        self.chunks = MildChunks(
            call.q, call.k, call.g, places, call.chunks, call.C, call.eps, call.packed is not None, call.wide
        )
        # G by chunks cut in two; of mild chunks, the gradient of the keys that write.
        self.sums = call.by_chunk(call.heads, call.C, call.K)

    def _grid(self, meta: Any) -> tuple[Any, ...]:
        return self.call.chunks * self.call.heads, self.call.batch

    def prepare(self, inverse: Tensor) -> dict[str, Tensor]:
        """The steps and a chunk's parts that no state enters. What reads and writes the state has decays and norms
        inside, so that nobody reads those of a token."""
        call, chunks = self.call, self.chunks
        made = prepared(call)
        unread = made.pop("norms")
        args = made | prepare_args(call, inverse) | {"g": self.g, "mild": chunks.mild, **strides("g", self.g, "bth")}
        _triton_backward_channels.prepare(
            self._grid, BROAD, decay=self.sums, queries=chunks.queries, keys=chunks.keys, out_keys=chunks.out_keys,
            ends=chunks.ends, CUTS=call.cuts, SKIP=int(chunks.told_apart), **args,
        )  # fmt: skip
        if chunks.told_apart:
            inside = {"GATED": 0, "NORM": 0, "MILD": 1, "decay": unread, "norms": unread}
            _triton_states.prepare(self._grid, NARROW, dots=chunks.dots, **(args | chunks.rows() | inside))
        return made | {"decay": unread, "norms": unread, "ends": chunks.ends, "q": chunks.queries,
                       "k": chunks.keys, "out_keys": chunks.out_keys}  # fmt: skip

    def gradients(self, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
        call, g, beta = self.call, self.g, self.call.beta
        dv, dg = call.new(*call.v.shape, dtype=call.v.dtype), call.new(*g.shape, dtype=g.dtype)
        dbeta = call.new(0) if beta is None else call.new(*beta.shape, dtype=beta.dtype)
        d_scores, d_between = (call.by_chunk(call.heads, call.C, call.C, dtype=call.inner) for _ in range(2))
        _triton_mild_gradients.value_grad(
            self._grid, NARROW, BV=call.at_once(128), dv=dv, dbeta=dbeta, d_between=d_between,
            BETA=int(beta is not None), **only(made, "steps errors d_rows"), **call.common,
        )  # fmt: skip
        direct = call.per_key == 1
        rows = call.batch, call.tokens, call.heads, call.K
        dq, dk = (call.new(*rows, dtype=t.dtype if direct else torch.float32) for t in (call.q, call.k))
        pairs = {"d_scores": d_scores, "d_between": d_between}
        # Of chunks by cuts: the gradient of G, and that of keys that read. Of mild ones: of queries, and of those keys.
        parts = [call.by_chunk(call.heads, call.C, call.K) for _ in range(2)]
        given = made | pairs | {"dv": dv}
        self._by_cuts(given, parts, dq, dk, dg)
        if self.chunks.told_apart:
            self._mild(given, parts, dq, dk, dg)
        if not direct:
            dq, dk = (d.unflatten(2, (call.key_heads, -1)).sum(3).to(like.dtype)
                      for d, like in ((dq, call.q), (dk, call.k)))  # fmt: skip
        return dq, dk, dv, dg, dbeta

    def _by_cuts(self, given: dict[str, Tensor], parts: list[Tensor], dq: Tensor, dk: Tensor, dg: Tensor) -> None:
        call, chunks = self.call, self.chunks
        d_decay, d_reads = parts
        shared = {"BV": call.at_once(64), "decay": self.sums, "d_decay": d_decay, "per_key": call.per_key,
                  "eps": call.eps or 0.0, "CUTS": call.cuts, "NORM": int(call.eps is not None), "mild": chunks.mild,
                  "SKIP": int(chunks.told_apart), "states": given["states"], "k": call.k, **call.strides_of("k"),
                  **call.common}  # fmt: skip
        queries = {"q": call.q, **call.strides_of("q"), **only(given, "steps errors")}
        _triton_backward_channels.query_grad(
            self._grid, BROAD, do=call.do, d_scores=given["d_scores"], dq=dq, scale=call.scale,
            **call.strides_of("do"), **queries, **shared,
        )  # fmt: skip
        _triton_backward_channels.read_grad(
            self._grid, BROAD, d_reads=d_reads, **only(given, "d_between dv"), **shared
        )
        _triton_backward_channels.key_grad(
            self._grid, BROAD, d_reads=d_reads, dk=dk, dg=dg, **only(given, "d_scores d_between ends d_states"),
            **queries, **shared,
        )  # fmt: skip

    def _mild(self, given: dict[str, Tensor], parts: list[Tensor], dq: Tensor, dk: Tensor, dg: Tensor) -> None:
        call, chunks = self.call, self.chunks
        d_queries, d_keys = parts
        d_out_keys, d_end = self.sums, call.by_chunk(call.heads, call.K)
        shared = {"mild": chunks.mild, "d_scores": given["d_scores"], **call.common}
        gemms = {"out_keys": chunks.out_keys, **only(given, "steps states errors"), **shared}
        _triton_mild_gradients.query_grad(
            self._grid, NARROW, BV=call.at_once(128), do=call.do, scale=call.scale, d_queries=d_queries,
            **call.strides_of("do"), **gemms,
        )  # fmt: skip
        _triton_mild_gradients.key_grad(
            self._grid, NARROW, BV=call.at_once(64), queries=chunks.queries, keys=chunks.keys,
            d_keys=d_keys, d_out_keys=d_out_keys, d_end=d_end, **only(given, "d_states d_between dv"), **gemms,
        )  # fmt: skip
        without = {name: arg for name, arg in shared.items() if name not in ("V", "WIDE")}
        _triton_mild_gradients.grads(
            self._grid, {"num_warps": 1, "num_stages": 1, "ROWS": ROWS}, q=call.q, k=call.k, g=self.g,
            ends=chunks.ends, d_queries=d_queries, d_keys=d_keys,
            d_out_keys=d_out_keys, d_end=d_end, dq=dq, dk=dk, dg=dg, per_key=call.per_key, eps=call.eps or 0.0,
            NORM=int(call.eps is not None), **call.strides_of("q", "k"), **strides("g", self.g, "bth"), **without,
        )  # fmt: skip
