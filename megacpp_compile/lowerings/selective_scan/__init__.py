"""`megacpp::selective_scan`: Mamba-1's recurrence, which has a decay for each channel and state (S6).

    u              [b, t, d]   any floating dtype, any strides
    dt             [b, t, d]   step sizes, behind bias and softplus
    A              [d, n]      decay rates, normally negative
    B, C           [b, t, n]   one for all channels
    D              [d] or None   skip: D * u is added to y
    initial_state  [b, d, n] or None (zeros)
    chunk_size     at least 1: how it is computed and what `states` holds, not what y is; t need not be a multiple
    returns        y [b, t, d] in `out_dtype`;  final_state [b, d, n];  states [b, ceil(t / chunk_size), d, n], those
                   that enter each chunk; both float32, or float64 where an operand is

    state_t = exp(dt_t A) * state_{t-1} + outer(dt_t * u_t, B_t);    y_t = state_t C_t + D * u_t

Computed in float32 (float64 for float64). A gate, y * silu(z), stands beside the op, as do the steps' bias and
softplus. Saved for backward: the operands and `states`, from which the states of a chunk's tokens are made anew. No
gradient flows through `states`.
An op of its own: `ssd_scan` decays all states of a head alike, so that a chunk of it is GEMMs; here are none.
Source: Mamba, https://arxiv.org/abs/2312.00752, algorithm 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate, shaped_like
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.selective_scan import reference


def _check(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> str | None:
    if [t.dim() for t in (u, dt, A, B, C)] != [3, 3, 2, 3, 3]:
        shapes = [tuple(t.shape) for t in (u, dt, A, B, C)]
        return f"u, dt, A, B and C are {shapes}: [b, t, d] twice, [d, n], and [b, t, n] twice"
    return None if chunk_size >= 1 else f"chunk_size is {chunk_size}, not 1 or more"


@define_op(reference.selective_scan, check=_check, served=True)
def selective_scan(u, dt, A, B, C, D, initial_state, chunk_size, out_dtype):  # type: ignore[no-untyped-def]
    (b, t, d), n = u.shape, A.shape[1]
    wide = compute_dtype(u, dt, A, B, C, D, initial_state)
    final, states = ((b, d, n), (b, (t + chunk_size - 1) // chunk_size, d, n))
    return u.new_empty((b, t, d), dtype=out_dtype), *(u.new_empty(shape, dtype=wide) for shape in (final, states))


@define_op(reference.selective_scan_backward, served=True)
def selective_scan_backward(dy, dfinal, u, dt, A, B, C, D, initial_state, states, chunk_size):  # type: ignore[no-untyped-def]
    return shaped_like(states, (u, dt, A, B, C, D, initial_state))


PREFERENCE = {"cpu": ("cpu_autograd", "reference")}

differentiate(
    selective_scan, selective_scan_backward, of="u dt A B C D initial_state",
    results="y final_state states", zeros="u",
)  # fmt: skip


def _flops(u: Tensor, dt: Tensor, A: Tensor, *_: Any) -> float:
    """An exponential for each token, channel and state, of which a GPU makes one in the time of some 64 FLOPs of a GEMM
    in 16 bits; a forward makes it twice, for the chunks' last states and for y."""
    return 128 * elements(u) * hint(A.shape[-1])


declare(
    {
        "megacpp::selective_scan": OpTraits(core=True, block_kind="mblock", flops=_flops, tokens=1),
        "megacpp::selective_scan_backward": OpTraits(),
    }
)
