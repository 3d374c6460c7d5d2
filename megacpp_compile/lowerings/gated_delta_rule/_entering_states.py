"""What backward makes anew of forward: the states that enter all chunks, and the errors F, segments side by side.

In Gluon on Hopper (`_gluon_states`); elsewhere, and of what that does not take, in Triton (`_triton_states`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _hopper, _triton_states
from megacpp_compile.lowerings.gated_delta_rule._backward_call import STAGES, Call, only

# Of V's channels a program has so many.
_COLUMNS = 64


def entering_states(call: Call, kept: Tensor, initial: Tensor | None, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """states [b, c, h, K, V] and errors [b, c, h, C, V], from `kept`, the states that enter segments.

    made: what `prepare` has written, by the names it has there."""
    if _hopper.serve(call, call.C, call.packed is not None):
        parts = (made[name] for name in "solve decay steps norms".split())
        states, errors = torch.ops.megacpp_delta.entering_states(call.k, call.v, kept, *parts)
        return {"states": states, "errors": errors}
    return _in_triton(call, kept, initial, made)


def _results(call: Call) -> dict[str, Tensor]:
    return {
        "states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "errors": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
    }


def _in_triton(call: Call, kept: Tensor, initial: Tensor | None, made: dict[str, Tensor]) -> dict[str, Tensor]:
    out, columns = _results(call), call.at_once(_COLUMNS)
    _triton_states.states(
        lambda meta: (kept.shape[1] * call.heads, call.V // columns, call.batch),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=columns, v=call.v, kept=kept,
        starts=call.packed.starts if call.packed else call.nothing, per_key=call.per_state, segments=kept.shape[1],
        initial=kept if initial is None else initial.contiguous(), EVERY=STATES_EVERY,
        INITIAL=int(initial is not None), CHANNELS=int(call.per_channel), **out,
        **only(made, "k out_keys solve decay steps norms ends"), **strides("k", made["k"], "bth"),
        **call.strides_of("v"), **call.common,
    )  # fmt: skip
    return out


def on_hopper(
    k: Tensor, v: Tensor, kept: Tensor, solve: Tensor, decay: Tensor, steps: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    call = _call(k, v)
    made = {"k": k, "out_keys": k, "solve": solve, "decay": decay, "steps": steps, "norms": norms, "ends": decay}
    out = _hopper.or_in_triton(
        "gated_delta_rule_backward",
        lambda: _in_gluon(call, kept, solve, decay, steps, norms),
        lambda: _in_triton(call, kept, None, made),
    )
    return out["states"], out["errors"]


def promised(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = _results(_call(k, v))
    return out["states"], out["errors"]


def _call(k: Tensor, v: Tensor) -> Call:
    """Of what the states are made of: queries and the output's gradient are not read."""
    return Call(v, k, k, v, None, None, None, 1.0, None, _hopper.CHUNK)


def _in_gluon(
    call: Call, kept: Tensor, solve: Tensor, decay: Tensor, steps: Tensor, norms: Tensor
) -> dict[str, Tensor]:
    out = _results(call)
    C, K = _hopper.CHUNK, _hopper.CHANNELS
    segments = kept.shape[1]
    _hopper.delta_states[(segments * call.heads, call.V // _COLUMNS, call.batch)](
        k=_hopper.tokens(call.k, K), v=_hopper.tokens(call.v, _COLUMNS), solve=_hopper.rows(solve, C, C),
        kept=_hopper.rows(kept, K, _COLUMNS), states=_hopper.rows(out["states"], K, _COLUMNS),
        errors=_hopper.rows(out["errors"], C, _COLUMNS), decay=decay, steps=steps, norms=norms, chunks=call.chunks,
        heads=call.heads, per_key=call.per_key, segments=segments, EVERY=STATES_EVERY, C=C, K=K, V=call.V,
        BV=_COLUMNS, STAGES=2, num_warps=4,
    )  # fmt: skip
    return out
