"""Gates a channel inside queries and keys, in front of linear attention's kernels, and out of their gradients again.

Chunks in which no channel decays by much are chunks of small decay, and have the delta rule's kernels
(`_triton_small_decay`); the others, by cuts, their own (`_triton_channels`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _triton_small_decay_gradients
from megacpp_compile.lowerings.gated_delta_rule._small_decay_chunks import ROWS, SmallDecayChunks
from megacpp_compile.lowerings.gated_linear_attention import _triton_channels
from megacpp_compile.lowerings.gated_linear_attention._call import LinearAttentionOperands, without

_BY_CUTS = {"num_warps": 8, "num_stages": 1}


class Channels:
    """Of a call."""

    def __init__(self, call: LinearAttentionOperands) -> None:
        assert call.g is not None
        self.call, self.g = call, call.g
        documents = call.packed is not None
        self.chunks = SmallDecayChunks(
            call.q, call.k, call.g, call.places, call.chunks, call.C, None, documents, call.wide
        )  # fmt: skip
        # Without kernels for chunks of small decay none is, and nobody says so.
        small_decay = self.chunks.small_decay
        self.small_decay = small_decay if self.chunks.told_apart else torch.zeros_like(small_decay)
        self.scores = call.by_chunk(call.C, call.C, dtype=call.inner)
        _triton_channels.rows(
            lambda meta: (self.chunks.programs,), _BY_CUTS, queries=self.chunks.queries, keys=self.chunks.out_keys,
            ends=self.chunks.ends, scores=self.scores, **self._by_cuts(),
        )  # fmt: skip

    def _operands(self) -> dict[str, Any]:
        call = self.call
        return {"q": call.q, "k": call.k, "g": self.g, "per_key": call.heads // call.key_heads,
                **strides("q", call.q, "bth"), **strides("k", call.k, "bth"),
                **strides("g", self.g, "bth")}  # fmt: skip

    def _by_cuts(self) -> dict[str, Any]:
        call = self.call
        return {"K": call.K, "BK": min(call.K, _triton_channels.AT_ONCE), "CUTS": call.C.bit_length() - 1,
                **self._operands(), **self.chunks.by_cuts(), **call.common}  # fmt: skip

    def rows(self) -> dict[str, Any]:
        """As `LinearAttentionOperands.rows`."""
        return {"q": self.chunks.queries, "k": self.chunks.out_keys, "per_key": 1, "decay": self.call.nothing,
                "ends": self.chunks.ends, "small_decay": self.small_decay, "dots": self.chunks.dots,
                "scores": self.scores,
                "GATED": 0, "CHANNELS": 1}  # fmt: skip

    def gradients(self, d_queries: Tensor, d_keys: Tensor, d_scores: Tensor, d_end: Tensor) -> tuple[Tensor, ...]:
        """dq, dk and dg, for the gradients that `gla_gradients` writes."""
        call, g = self.call, self.g
        shape, shared = (call.batch, call.tokens, call.heads, call.K), call.heads > call.key_heads
        dq, dk = (call.new(*shape, dtype=torch.float32 if shared else t.dtype) for t in (call.q, call.k))
        dg = call.new(*g.shape, dtype=g.dtype)
        given = {"d_scores": d_scores, "d_queries": d_queries, "d_end": d_end, "dq": dq, "dk": dk, "dg": dg}
        if self.chunks.told_apart:
            _triton_small_decay_gradients.grads(
                lambda meta: (call.chunks * call.heads, call.batch), {"num_warps": 1, "num_stages": 1, "ROWS": ROWS},
                small_decay=self.small_decay, ends=self.chunks.ends, d_keys=call.nothing, d_out_keys=d_keys, eps=0.0,
                NORM=0, READS=0,
                K=call.K, **given, **self._operands(), **without(call.common, "WIDE"),
            )  # fmt: skip
        _triton_channels.rows_gradient(
            lambda meta: (self.chunks.programs,), _BY_CUTS, d_keys=d_keys, **given, **self._by_cuts()
        )
        if shared:
            dq, dk = (d.unflatten(2, (call.key_heads, -1)).sum(3).to(like.dtype)
                      for d, like in ((dq, call.q), (dk, call.k)))  # fmt: skip
        return dq, dk, dg
