"""The last part of `gated_delta_rule`'s backward with gates a channel: all gradients, of chunks of small decay.

Gradients of v and beta are of all chunks. On Hopper one kernel in Gluon makes them (`_gluon_channel_grads`), elsewhere,
and of what that does not take, four in Triton (`_triton_small_decay_gradients`). `_backward_channels` makes those of
the other chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.gluon_launch import launch, numbers
from megacpp_compile.lowerings.gated_delta_rule import _hopper, _small_decay_chunks, _triton_small_decay_gradients
from megacpp_compile.lowerings.gated_delta_rule._backward_call import NARROW, BackwardOperands, only

# Rows of a chunk that the last kernel's loop has unrolled.
ROWS = 8
# Of a program in Gluon.
WARPS = 8


def results(call: BackwardOperands) -> tuple[Tensor, ...]:
    """dq, dk [b, t, heads, K], in float32 where they are to be summed over the value heads of a key head, dv, dg,
    dbeta, which is empty without betas, and d_between [b, c, heads, C, C], the gradient of A before decays. Of chunks
    of large decay dq, dk and dg are left to others, and of others d_between says nothing."""
    g, beta = call.g, call.beta
    assert g is not None
    rows, whole = (call.batch, call.tokens, call.heads, call.K), call.per_key == 1
    dq, dk = (call.new(*rows, dtype=t.dtype if whole else torch.float32) for t in (call.q, call.k))
    dv, dg = call.new(*call.v.shape, dtype=call.v.dtype), call.new(*g.shape, dtype=g.dtype)
    dbeta = call.new(0) if beta is None else call.new(*beta.shape, dtype=beta.dtype)
    return dq, dk, dv, dg, dbeta, call.by_chunk(call.heads, call.C, call.C, dtype=call.inner)


def in_triton(call: BackwardOperands, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """`results`. made: what the kernels before have written, queries, keys and out_keys with the gates inside; and
    spare, float32 [b, c, heads, C, K], of which nobody reads the rows of chunks of small decay."""
    dq, dk, dv, dg, dbeta, d_between = results(call)

    def grid(meta: Any) -> tuple[Any, ...]:
        return call.chunks * call.heads, call.batch

    _triton_small_decay_gradients.value_grad(
        grid, NARROW, BV=call.at_once(128), dv=dv, dbeta=dbeta, d_between=d_between,
        BETA=int(call.beta is not None), **only(made, "steps errors d_rows"), **call.common,
    )  # fmt: skip
    if _small_decay_chunks.told_apart(call.wide):
        d_scores = call.by_chunk(call.heads, call.C, call.C, dtype=call.inner)
        d_queries, d_keys = (call.by_chunk(call.heads, call.C, call.K) for _ in range(2))
        d_out_keys, d_end = made["spare"], call.by_chunk(call.heads, call.K)
        shared = {"d_scores": d_scores, **only(made, "small_decay"), **call.common}
        gemms = only(made, "out_keys steps states errors") | shared
        _triton_small_decay_gradients.query_grad(
            grid, NARROW, BV=call.at_once(128), do=call.do, scale=call.scale, d_queries=d_queries,
            **call.strides_of("do"), **gemms,
        )  # fmt: skip
        _triton_small_decay_gradients.key_grad(
            grid, NARROW, BV=call.at_once(64), d_between=d_between, dv=dv, d_keys=d_keys, d_out_keys=d_out_keys,
            d_end=d_end, **only(made, "queries keys d_states"), **gemms,
        )  # fmt: skip
        without = {name: arg for name, arg in shared.items() if name not in ("V", "WIDE")}
        _triton_small_decay_gradients.grads(
            grid, {"num_warps": 1, "num_stages": 1, "ROWS": ROWS}, q=call.q, k=call.k, g=call.g,
            d_queries=d_queries, d_keys=d_keys, d_out_keys=d_out_keys, d_end=d_end, dq=dq, dk=dk, dg=dg,
            per_key=call.per_key, eps=call.eps or 0.0, NORM=int(call.eps is not None), READS=1, **only(made, "ends"),
            **call.strides_of("q", "k", "g"), **without,
        )  # fmt: skip
    return dq, dk, dv, dg, dbeta, d_between


def in_gluon(call: BackwardOperands, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The same."""
    out = dq, dk, dv, dg, dbeta, d_between = results(call)
    C, K, whole = _hopper.CHUNK, _hopper.CHANNELS, call.per_key == 1
    assert call.g is not None
    by_tokens = {"q": call.q, "k": call.k, "g": call.g, "do": call.do, "dv": dv, "dg": dg}
    by_tokens |= only(made, "queries keys out_keys") | ({"dq": dq, "dk": dk} if whole else {})
    launch(
        _hopper.delta_channel_grads, (call.chunks * call.heads, call.batch),
        **{name: _hopper.tokens(t, K) for name, t in by_tokens.items()}, **({} if whole else {"dq": dq, "dk": dk}),
        **{name: _hopper.rows(made[name], C, K) for name in ("errors", "d_rows")},
        **{name: _hopper.rows(made[name], K, K) for name in ("states", "d_states")},
        **only(made, "steps small_decay"), d_between=d_between, dbeta=dbeta, tokens=call.tokens, chunks=call.chunks,
        heads=call.heads, per_key=call.per_key, scale=call.scale, eps=call.eps or 0.0, C=C, K=K, V=K,
        GATE=numbers(call.g.dtype), BETA=int(call.beta is not None), NORM=int(call.eps is not None),
        WHOLE=int(whole), num_warps=WARPS,
    )  # fmt: skip
    return out
