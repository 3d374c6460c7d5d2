"""`megacpp::ssd_scan`: Mamba-2's state-space recurrence over a sequence, computed chunk by chunk.

    x              [b, t, h, p]  any floating dtype, any strides
    dt             [b, t, h]     step sizes, behind bias, softplus and clamp
    A              [h]           decay rates, normally negative
    B, C           [b, t, g, n]  h = g * heads of a group; head i reads group i // (h // g)
    D              [h] or None   skip: D * x is added to y
    initial_state  [b, h, p, n] or None (zeros)
    seq_idx        [b, t] integers or None: the document of each token. A document begins where the number is another
                   than the token's before it; there the state begins anew, as zeros
    returns        y [b, t, h, p] in `out_dtype`;  final_state [b, h, p, n];  states [b, ceil(t / chunk_size), h, p, n],
                   the state that enters each chunk; both states float32, or float64 where an operand is

    state_t = exp(dt_t * A) * state_{t-1} + dt_t * outer(x_t, B_t);    y_t = state_t @ C_t + D * x_t

`chunk_size`, a power of two from 16 to 256, decides how it is computed and what `states` holds, not what y is. t need
not be a multiple of it. Computed in float32 (float64 for float64).
Documents are told by where their numbers change, so these need not ascend. No token comes before the first, which
continues `initial_state` whatever its number is; the final state is the last document's.
Saved for backward: the operands and `states`. No gradient flows through `states`.
Source: Mamba-2, https://arxiv.org/abs/2405.21060, section 6 (the block decomposition) and listing 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megacpp_compile.fx.sizes import elements, hint
from megacpp_compile.lowerings._op import compute_dtype, define_op, differentiate, shaped_like
from megacpp_compile.lowerings._traits import OpTraits, declare
from megacpp_compile.lowerings.ssd_scan import _hopper_ops, reference

PREFERENCE = {"cpu": ("cpu_autograd", "cpu_chunks", "reference")}


@define_op(reference.ssd_scan)
def ssd_scan(x, dt, A, B, C, D, initial_state, chunk_size, out_dtype, seq_idx=None):  # type: ignore[no-untyped-def]
    return _hopper_ops.promised(x, B, chunk_size, out_dtype, compute_dtype(x, dt, A, B, C, D, initial_state))


@define_op(reference.ssd_scan_backward)
def ssd_scan_backward(dy, dfinal, x, dt, A, B, C, D, initial_state, states, chunk_size, seq_idx=None):  # type: ignore[no-untyped-def]
    return shaped_like(states, (x, dt, A, B, C, D, initial_state))


differentiate(ssd_scan, ssd_scan_backward, of="x dt A B C D initial_state", results="y final_state states", zeros="x")


def _flops(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, state: Any, chunk: int, *_: Any) -> float:
    """The GEMMs over whole chunks: a group's C by its B, a head's scores by its x, and what a head adds to the state
    and reads of it. Carrying states from chunk to chunk is left out: it moves bytes."""
    tokens, length = elements(dt), min(chunk, max(hint(x.shape[1]), 1))
    groups = elements(B) / hint(B.shape[-1])
    p, n = hint(x.shape[-1]), hint(B.shape[-1])
    return 2 * length * (groups * n + tokens * p) + 4 * tokens * p * n


declare(
    {
        "megacpp::ssd_scan": OpTraits(core=True, block_kind="mblock", flops=_flops, tokens=1),
        "megacpp::ssd_scan_backward": OpTraits(),
    }
)
