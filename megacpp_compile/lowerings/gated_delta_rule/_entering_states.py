"""What backward makes anew of forward: the states that enter all chunks, and the errors F, segments side by side.

In Gluon on Hopper with gates a head (`_gluon_states`); otherwise in Triton (`_triton_states`).
"""

from __future__ import annotations

from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY
from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _hopper, _triton_states
from megacpp_compile.lowerings.gated_delta_rule._backward_call import STAGES, BackwardOperands, only

# Of V's channels a program has so many.
_COLUMNS = 64


def results(call: BackwardOperands) -> dict[str, Tensor]:
    """states [b, c, h, K, V] and errors [b, c, h, C, V]."""
    return {
        "states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "errors": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
    }


def in_triton(
    call: BackwardOperands, kept: Tensor, initial: Tensor | None, made: dict[str, Tensor], out: dict[str, Tensor]
) -> None:
    """Into `out`, from `kept`, the states that enter segments.

    initial: the first state, of which documents that no segment begins with are made. made: what `prepare` has
    written, by the names it has there."""
    columns = call.at_once(_COLUMNS)
    _triton_states.states(
        lambda meta: (kept.shape[1] * call.heads, call.V // columns, call.batch),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=columns, v=call.v, kept=kept,
        starts=call.packed.starts if call.packed else call.nothing, per_key=call.per_state, segments=kept.shape[1],
        initial=kept if initial is None else initial.contiguous(), EVERY=STATES_EVERY,
        INITIAL=int(initial is not None), CHANNELS=int(call.per_channel), **out,
        **only(made, "k out_keys solve decay steps norms ends"), **strides("k", made["k"], "bth"),
        **call.strides_of("v"), **call.common,
    )  # fmt: skip


def in_gluon(call: BackwardOperands, kept: Tensor, made: dict[str, Tensor], out: dict[str, Tensor]) -> None:
    """The same of gates a head, without documents."""
    C, K, segments = _hopper.CHUNK, _hopper.CHANNELS, kept.shape[1]
    launch(
        _hopper.delta_states, (segments * call.heads, call.V // _COLUMNS, call.batch),
        k=_hopper.tokens(call.k, K), v=_hopper.tokens(call.v, _COLUMNS), solve=_hopper.rows(made["solve"], C, C),
        kept=_hopper.rows(kept, K, _COLUMNS), states=_hopper.rows(out["states"], K, _COLUMNS),
        errors=_hopper.rows(out["errors"], C, _COLUMNS), **only(made, "decay steps norms"), chunks=call.chunks,
        heads=call.heads, per_key=call.per_key, segments=segments, EVERY=STATES_EVERY, C=C, K=K, V=call.V,
        BV=_COLUMNS, STAGES=2, num_warps=4,
    )  # fmt: skip
