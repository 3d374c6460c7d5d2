"""The last part of `gated_delta_rule`'s backward with a gate a head or none: all gradients, chunks side by side.

On Hopper two kernels in Gluon make them (`_gluon_query_grad`, `_gluon_key_grad`), elsewhere, and of what those do not
take, three in Triton (`_triton_gradients`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings.gated_delta_rule import _hopper, _triton_gradients
from megacpp_compile.lowerings.gated_delta_rule._backward_call import BROAD, NARROW, BackwardOperands, only


def results(call: BackwardOperands) -> tuple[Tensor, ...]:
    """dq, dk, dv, dg and dbeta, the last two empty where there are no gates or betas."""
    dq, dk, dv = (call.new(*t.shape, dtype=t.dtype) for t in (call.q, call.k, call.v))
    dg, dbeta = (call.new(0) if t is None else call.new(*t.shape, dtype=t.dtype) for t in (call.g, call.beta))
    return dq, dk, dv, dg, dbeta


def in_triton(call: BackwardOperands, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """`results`. made: what the kernels before have written, by the names it has there."""
    q, k, g, beta = call.q, call.k, call.g, call.beta
    dq, dk, dv, dg, dbeta = results(call)
    d_scores, d_between = (call.by_chunk(call.key_heads, call.C, call.C, dtype=call.inner) for _ in range(2))
    d_decay = call.by_chunk(call.heads, _triton_gradients.PARTS, call.C)
    common = {"HB": call.per_key, "key_heads": call.key_heads, "d_decay": d_decay,
              **only(made, "decay steps norms errors"), **call.common}  # fmt: skip
    norm, columns = {"NORM": int(call.eps is not None)}, call.at_once(128)
    _triton_gradients.query_grad(
        lambda meta: call.by_key, NARROW, BV=columns, q=q, k=k, do=call.do, dq=dq, scale=call.scale,
        states=made["states"], d_scores=d_scores, **norm, **call.strides_of("q", "k", "do"), **common,
    )  # fmt: skip
    _triton_gradients.value_grad(
        lambda meta: call.by_key, NARROW, BV=columns, k=k, d_rows=made["d_rows"], dv=dv, dbeta=dbeta,
        d_between=d_between, BETA=int(beta is not None), **call.strides_of("k"), **common,
    )  # fmt: skip
    _triton_gradients.key_grad(
        lambda meta: call.by_key, BROAD, BV=columns, q=q, k=k, dv=dv, dk=dk, dg=dg,
        d_scores=d_scores, d_between=d_between, GATED=int(g is not None), **norm, **only(made, "states d_states"),
        **call.strides_of("q", "k"), **common,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta


class InGluon:
    """Into `results`: first that of q, then all others, which take two parts of it."""

    def __init__(self, call: BackwardOperands, made: dict[str, Tensor]) -> None:
        """made: what the kernels before have written, or, in time for a launch, will have."""
        self.call, self.made, self.results = call, made, results(call)
        C, K = _hopper.CHUNK, _hopper.CHANNELS
        d_scores = call.by_chunk(call.key_heads, C, C, dtype=torch.bfloat16)
        d_decay = call.by_chunk(call.heads, _hopper.PARTS, C)
        self.common: dict[str, Any] = {
            "q": _hopper.tokens(call.q, K), "k": _hopper.tokens(call.k, K), "d_decay": d_decay,
            "errors": _hopper.rows(made["errors"], C, K), "states": _hopper.rows(made["states"], K, K),
            "d_scores": _hopper.rows(d_scores, C, C),
            **only(made, "decay steps norms"), "chunks": call.chunks, "heads": call.heads,
            "key_heads": call.key_heads, "C": C, "K": K, "V": K, "HB": call.per_key,
            "NORM": int(call.eps is not None), "num_warps": 4,
        }  # fmt: skip

    def query(self) -> None:
        K = _hopper.CHANNELS
        launch(
            _hopper.delta_query_grad, self.call.by_key, do=_hopper.tokens(self.call.do, K),
            dq=_hopper.tokens(self.results[0], K), scale=self.call.scale, **self.common,
        )  # fmt: skip

    def others(self) -> None:
        call, C, K = self.call, _hopper.CHUNK, _hopper.CHANNELS
        _, dk, dv, dg, dbeta = self.results
        launch(
            _hopper.delta_key_grad, call.by_key, d_rows=_hopper.rows(self.made["d_rows"], C, K),
            d_states=_hopper.rows(self.made["d_states"], K, K),
            dk=_hopper.tokens(dk, K), dv=_hopper.tokens(dv, K), dg=dg, dbeta=dbeta, tokens=call.tokens,
            GATED=int(call.g is not None), BETA=int(call.beta is not None), **self.common,
        )  # fmt: skip
