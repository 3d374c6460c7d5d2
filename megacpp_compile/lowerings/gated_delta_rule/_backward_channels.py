"""What backward of `gated_delta_rule` has of its own for gates a channel: what no state enters, and the gradients.

Chunks by cuts have kernels of `_triton_backward_channels`; those of small decay have those of the rule without gates,
and of `_channel_gradients`, which are launched for all chunks and leave those by cuts alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _after_prepare, _triton_backward_channels, _triton_states
from megacpp_compile.lowerings.gated_delta_rule._backward_call import (
    BROAD,
    NARROW,
    BackwardOperands,
    only,
    prepare_args,
    prepared,
)
from megacpp_compile.lowerings.gated_delta_rule._small_decay_chunks import SmallDecayChunks


class GatesAChannel:
    """Of a call."""

    def __init__(self, call: BackwardOperands) -> None:
        assert call.g is not None
        self.call, self.g = call, call.g
        places = call.packed.chunks if call.packed else call.nothing
        self.chunks = SmallDecayChunks(
            call.q, call.k, call.g, places, call.chunks, call.C, call.eps, call.packed is not None, call.wide
        )
        # G of chunks by cuts.
        self.sums = call.by_chunk(call.heads, call.C, call.K)

    def _grid(self, meta: Any) -> tuple[Any, ...]:
        return self.call.chunks * self.call.heads, self.call.batch

    def _few(self, meta: Any) -> tuple[Any, ...]:
        return (self.chunks.programs,)

    def prepare(self, inverse: Tensor) -> dict[str, Tensor]:
        """The steps and a chunk's parts that no state enters. What reads and writes the state has decays and norms
        inside, so that nobody reads those of a token."""
        call, chunks = self.call, self.chunks
        made = prepared(call)
        unread = made.pop("norms")
        args = made | prepare_args(call, inverse) | {"g": self.g, **strides("g", self.g, "bth")}
        _triton_backward_channels.prepare(
            self._few, BROAD, decay=self.sums, queries=chunks.queries, keys=chunks.keys, out_keys=chunks.out_keys,
            ends=chunks.ends, CUTS=call.cuts, **chunks.by_cuts(), **args,
        )  # fmt: skip
        if chunks.told_apart:
            inside = {"small_decay": chunks.small_decay, "GATED": 0, "NORM": 0, "SMALL_DECAY": 1, "decay": unread,
                      "norms": unread}
            _triton_states.prepare(self._grid, NARROW, dots=chunks.dots, **(args | chunks.rows() | inside))
        return made | {"decay": unread, "norms": unread, "ends": chunks.ends, "q": chunks.queries, "k": chunks.keys,
                       "queries": chunks.queries, "keys": chunks.keys, "out_keys": chunks.out_keys,
                       "small_decay": chunks.small_decay, "spare": self.sums}  # fmt: skip

    def backward(
        self, dfinal: Tensor | None, kept: Tensor, initial: Tensor | None, inverse: Tensor
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv, dg, dbeta and the first state's, as `_after_prepare.of_heads`."""
        call = self.call
        made = self.prepare(inverse)
        grads, left = _after_prepare.of_channels(call, dfinal, kept, initial, inverse, made)
        dq, dk, dv, dg, dbeta, d_initial = grads
        self._by_cuts(made | left, dq, dk, dg)
        if call.per_key > 1:
            dq, dk = (d.unflatten(2, (call.key_heads, -1)).sum(3).to(like.dtype)
                      for d, like in ((dq, call.q), (dk, call.k)))  # fmt: skip
        return dq, dk, dv, dg, dbeta, d_initial

    def _by_cuts(self, given: dict[str, Tensor], dq: Tensor, dk: Tensor, dg: Tensor) -> None:
        call, chunks = self.call, self.chunks
        # The gradient of P, that of G, and that of the keys that read.
        d_scores = call.by_chunk(call.heads, call.C, call.C, dtype=call.inner)
        d_decay, d_reads = (call.by_chunk(call.heads, call.C, call.K) for _ in range(2))
        shared = {"BV": call.at_once(64), "decay": self.sums, "d_decay": d_decay, "per_key": call.per_key,
                  "eps": call.eps or 0.0, "CUTS": call.cuts, "NORM": int(call.eps is not None),
                  "states": given["states"], "k": call.k, **call.strides_of("k"), **chunks.by_cuts(),
                  **call.common}  # fmt: skip
        queries = {"q": call.q, **call.strides_of("q"), **only(given, "steps errors")}
        _triton_backward_channels.query_grad(
            self._few, BROAD, do=call.do, d_scores=d_scores, dq=dq, scale=call.scale,
            **call.strides_of("do"), **queries, **shared,
        )  # fmt: skip
        _triton_backward_channels.read_grad(
            self._few, BROAD, d_reads=d_reads, **only(given, "d_between dv"), **shared
        )
        _triton_backward_channels.key_grad(
            self._few, BROAD, d_reads=d_reads, dk=dk, dg=dg, d_scores=d_scores,
            **only(given, "d_between ends d_states"), **queries, **shared,
        )  # fmt: skip
