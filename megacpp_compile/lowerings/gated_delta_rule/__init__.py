"""`megacpp::gated_delta_rule`: the delta rule with gates, computed chunk by chunk: Gated DeltaNet, Kimi Delta
Attention, DeltaNet.

    q, k           [b, t, hk, k]  any floating dtype, any strides; value head i reads key head i // (hv // hk)
    v              [b, t, hv, v]
    g              natural logarithms of decays, at most 0: [b, t, hv] one a head, [b, t, hv, k] one a channel, or None
    beta           [b, t, hv] how much of a value is written, or None (all)
    initial_state  [n, hv, k, v] or None (zeros); n = b, or the number of documents
    cu_seqlens     None, or int32 [n + 1] with b = 1: documents behind one another, document i being the tokens from
                   cu_seqlens[i] to cu_seqlens[i + 1], ascending from 0 to t, some perhaps empty. Each has a state of
                   its own
    scale          multiplies o
    qk_norm_eps    None, or q and k are first x * rsqrt(sum(x^2) + eps), over channels, in the compute dtype
    chunk_size     16, 32 or 64: how it is computed and what `states` and `inverse` hold, not what o is
    returns        o [b, t, hv, v] in `out_dtype`;  final_state [n, hv, k, v];
                   states [b, s, hv, k, v], the state that enters every 8th chunk (`STATES_EVERY`);
                   inverse [b, t, hv, chunk_size], rows of T = (I + L)^-1 of each chunk (`reference`)

    S_t = diag(exp g_t) S_t-1 + k_t u_t^T,  u_t = beta_t (v_t - (diag(exp g_t) S_t-1)^T k_t);   o_t = scale S_t^T q_t

Computed in float32 (float64 where an operand is); states are in that dtype, as is `inverse`, but for bfloat16 where q,
k and v are all of half precision.
Chunks are counted from the start of each row, or of each document: t or a document need not be a multiple of them. With
cu_seqlens the chunks of all documents stand behind one another, and chunk 8 s of them all has row s of `states`: there
is room for ceil(t / chunk_size) + n chunks, and rows beyond the last chunk are zero.
Saved for backward: the operands, `states` and `inverse`. No gradient flows through those two.
Source: https://arxiv.org/abs/2412.06464 (a gate a head), https://arxiv.org/abs/2510.26692 (a gate a channel),
https://arxiv.org/abs/2406.06484 (none, and the parallel form over a chunk).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY, segments_bound
from megacpp_compile.lowerings._kernels.gated_chunks import CHUNK_SIZES, operand_problem
from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate, shaped_like
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.gated_delta_rule import _hopper_ops as _hopper_ops
from megacpp_compile.lowerings.gated_delta_rule import reference

__all__ = ["CHUNK_SIZES", "STATES_EVERY", "gated_delta_rule", "gated_delta_rule_backward"]
PREFERENCE = {"cpu": ("cpu_autograd", "reference")}


@define_op(reference.gated_delta_rule, check=operand_problem, served=True)
def gated_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_norm_eps, chunk_size, out_dtype):  # type: ignore[no-untyped-def]
    b, t, hv, size = v.shape
    wide = compute_dtype(q, k, v, g, beta, initial_state)
    sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    segments = segments_bound(t, chunk_size, cu_seqlens)
    return (
        v.new_empty((b, t, hv, size), dtype=out_dtype),
        v.new_empty((sequences, hv, q.shape[3], size), dtype=wide),
        v.new_empty((b, segments, hv, q.shape[3], size), dtype=wide),
        v.new_empty((b, t, hv, chunk_size), dtype=reference.inverse_dtype(q, k, v, wide)),
    )


@define_op(reference.gated_delta_rule_backward, served=True)
def gated_delta_rule_backward(  # type: ignore[no-untyped-def]
    do, dfinal, q, k, v, g, beta, initial_state, cu_seqlens, states, inverse, scale, qk_norm_eps, chunk_size
):
    return shaped_like(states, (q, k, v, g, beta, initial_state))


differentiate(
    gated_delta_rule, gated_delta_rule_backward, of="q k v g beta initial_state",
    results="o final_state states inverse", zeros="v",
)  # fmt: skip


def _flops(
    q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, state: Any, cu: Any, scale: float, eps: Any, chunk: int, *_: Any
) -> float:
    """By value head and token: the scores of keys and of queries with a chunk's keys, T and scores times what is
    written, and the state read twice and written once. The inverse is left out: it is small beside them."""
    keys, values = hint(q.shape[-1]), hint(v.shape[-1])
    length = min(chunk, max(hint(q.shape[1]), 1))
    return 2 * elements(v) / values * (2 * length * (keys + values) + 3 * keys * values)


declare(
    {
        "megacpp::gated_delta_rule": OpTraits(core=True, block_kind="mblock", flops=_flops, tokens=1),
        "megacpp::gated_delta_rule_backward": OpTraits(),
    }
)
