"""`megacpp::gated_linear_attention`: linear attention whose state decays, computed chunk by chunk: GLA, simple GLA,
RetNet, lightning attention, and with no gate plain causal linear attention.

    q, k           [b, t, hk, k]  any floating dtype, any strides; value head i reads key head i // (hv // hk)
    v              [b, t, hv, v]
    g              natural logarithms of decays, at most 0 (-inf clears the state): [b, t, hv] one a head (a constant of
                   a head: `expand`ed), [b, t, hv, k] one a channel, or None
    initial_state  [n, hv, k, v] or None (zeros); n = b, or the number of documents
    cu_seqlens     None, or int32 [n + 1] with b = 1: documents, as in `gated_delta_rule`
    scale          multiplies o
    chunk_size     16, 32 or 64: how it is computed and what `states` holds, not what o is
    returns        o [b, t, hv, v] in `out_dtype`;  final_state [n, hv, k, v];
                   states [b, s, hv, k, v], the state that enters every 8th chunk, as in `gated_delta_rule`

    S_t = diag(exp g_t) S_t-1 + k_t v_t^T;   o_t = scale S_t^T q_t

Computed in float32 (float64 where an operand is), and states are in that dtype. A query sees its own token; where a
model adds that with a weight of its own, it stands beside the op.
Saved for backward: the operands and `states`. No gradient flows through `states`.

An op of its own. It is not `ssd_scan` with a step of one: there a decay is exp(dt A) and what a token adds is dt B x,
one dt for both, so that a step of one leaves room for a constant decay a head only; a decay a token would have to be
divided out of x again, by numbers that are zero where nothing decays, and a decay a channel has no place at all. It is
not `gated_delta_rule` with a flag either: that saves the inverse of a matrix that is the identity here, and its
backward recomputes what each token lacks. The two share their chunks (`_kernels.gated_chunks`).
Source: https://arxiv.org/abs/2312.06635 (gates, and the form over a chunk with gates a channel),
https://arxiv.org/abs/2307.08621 (constant decays).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.errors import OperandError
from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._kernels.chunk_grid import segments_bound
from megacpp_compile.lowerings._kernels.gated_chunks import operand_problem
from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate, shaped_like
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.gated_linear_attention import reference

PREFERENCE = {"cpu": ("cpu_autograd", "reference")}


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int) -> None:
    if (problem := operand_problem(q, k, v, g, cu_seqlens, chunk_size)) is not None:
        raise OperandError("megacpp::gated_linear_attention", problem)


@define_op(reference.gated_linear_attention, check=_check, served=True)
def gated_linear_attention(q, k, v, g, initial_state, cu_seqlens, scale, chunk_size, out_dtype):  # type: ignore[no-untyped-def]
    b, t, hv, size = v.shape
    wide = compute_dtype(q, k, v, g, initial_state)
    sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        v.new_empty((b, t, hv, size), dtype=out_dtype),
        v.new_empty((sequences, hv, q.shape[3], size), dtype=wide),
        v.new_empty((b, segments_bound(t, chunk_size, cu_seqlens), hv, q.shape[3], size), dtype=wide),
    )


@define_op(reference.gated_linear_attention_backward, served=True)
def gated_linear_attention_backward(do, dfinal, q, k, v, g, initial_state, cu_seqlens, states, scale, chunk_size):  # type: ignore[no-untyped-def]
    return shaped_like(states, (q, k, v, g, initial_state))


differentiate(
    gated_linear_attention, gated_linear_attention_backward, of="q k v g initial_state",
    results="o final_state states", zeros="v",
)  # fmt: skip


def _flops(q: Tensor, k: Tensor, v: Tensor, g: Any, state: Any, cu: Any, scale: float, chunk: int, *_: Any) -> float:
    """By value head and token: the scores with a chunk's keys, those times values, and the state read and written."""
    keys, values = hint(q.shape[-1]), hint(v.shape[-1])
    length = min(chunk, max(hint(q.shape[1]), 1))
    return 2 * elements(v) / values * (length * (keys + values) + 2 * keys * values)


declare(
    {
        "megacpp::gated_linear_attention": OpTraits(core=True, block_kind="mblock", flops=_flops, tokens=1),
        "megacpp::gated_linear_attention_backward": OpTraits(),
    }
)
