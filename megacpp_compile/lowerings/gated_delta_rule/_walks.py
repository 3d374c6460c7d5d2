"""The last part of `gated_delta_rule`'s forward: the walk over chunks.

In Gluon on Hopper (`_gluon_walk`); elsewhere, and of what that does not take, in Triton (`_triton_walk`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.chunk_grid import STATES_EVERY
from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _hopper, _triton_walk
from megacpp_compile.lowerings.gated_delta_rule._forward_call import COLUMNS, STAGES, ForwardOperands

# Of V's channels a program of Gluon's walk has so many.
_GLUON_COLUMNS = 64


def walk(
    call: ForwardOperands, prepared: dict[str, Any], tables: tuple[Tensor, Tensor], inverse: Tensor, mixed: Tensor,
    initial_state: Tensor | None, scale: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the last state, and the states every `STATES_EVERY` chunks.

    prepared: what `prepare` leaves to the walk. tables: cu_seqlens and documents' first chunks."""
    packed = call.documents is not None
    if out_dtype == torch.bfloat16 and _hopper.serve(call, call.C, packed):
        return torch.ops.megacpp_delta.walk(
            call.q, call.k, call.v, inverse, mixed, prepared["factors"], initial_state, scale
        )
    return _in_triton(call, prepared, tables, inverse, mixed, initial_state, scale, out_dtype)


def _results(call: ForwardOperands, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    o = call.new(call.batch, call.tokens, call.heads, call.V, dtype=out_dtype)
    last = call.new(call.sequences, call.heads, call.K, call.V)
    return o, last, call.new(call.batch, call.segments, call.heads, call.K, call.V)


def _in_triton(
    call: ForwardOperands, prepared: dict[str, Any], tables: tuple[Tensor, Tensor], inverse: Tensor, mixed: Tensor,
    initial_state: Tensor | None, scale: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    o, last, states = _results(call, out_dtype)
    packed, (documents, bases) = call.documents is not None, tables
    if packed:
        states.zero_()  # segments that are not there
    columns, stages = min(call.V, COLUMNS), 2 if call.wide else STAGES
    _triton_walk.walk(
        lambda meta: (call.V // columns, call.heads, call.sequences), {"num_warps": 4, "num_stages": stages},
        **prepared, v=call.v, inverse=inverse, mixed=mixed,
        first_state=last if initial_state is None else initial_state.contiguous(), documents=documents, bases=bases,
        o=o, states=states, last=last, tokens=call.tokens, heads=call.heads, chunks=call.chunks,
        segments=call.segments, scale=scale, **strides("v", call.v, "bth"), C=call.C, K=call.K, V=call.V,
        BV=columns, EVERY=STATES_EVERY, FIRST=int(initial_state is not None), DOCUMENTS=int(packed),
        WIDE=int(call.wide),
    )  # fmt: skip
    return o, last, states


def rows_as_they_are(call: ForwardOperands) -> dict[str, Any]:
    """Arguments of the walk with a gate a head: q and k have no gates inside."""
    return {"q": call.q, "k": call.k, "out_keys": call.k, "CHANNELS": 0, "per_key": call.heads // call.key_heads,
            **strides("q", call.q, "bth"), **strides("k", call.k, "bth")}  # fmt: skip


def on_hopper(
    q: Tensor, k: Tensor, v: Tensor, inverse: Tensor, mixed: Tensor, factors: Tensor, initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = ForwardOperands(q, k, v, None, None, None, _hopper.CHUNK)
    prepared = rows_as_they_are(call) | {"factors": factors, "ends": factors}
    tables = call.nothing, call.nothing
    return _hopper.kernels.or_in_triton(
        "gated_delta_rule",
        lambda: _in_gluon(call, inverse, mixed, factors, initial_state),
        lambda: _in_triton(call, prepared, tables, inverse, mixed, initial_state, scale, torch.bfloat16),
    )


def promised(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _results(ForwardOperands(q, k, v, None, None, None, _hopper.CHUNK), torch.bfloat16)


def _in_gluon(
    call: ForwardOperands, inverse: Tensor, mixed: Tensor, factors: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    o, last, states = _results(call, torch.bfloat16)
    C, K = _hopper.CHUNK, _hopper.CHANNELS
    first = last if initial_state is None else initial_state.float().contiguous()
    by_columns = {"v": call.v, "inverse": inverse, "mixed": mixed, "o": o}
    by_keys = {"first_state": first, "states": states, "last": last}
    launch(
        _hopper.delta_walk, (call.V // _GLUON_COLUMNS, call.heads, call.batch),
        q=_hopper.tokens(call.q, K), k=_hopper.tokens(call.k, K), factors=factors,
        **{name: _hopper.tokens(t, _GLUON_COLUMNS) for name, t in by_columns.items()},
        **{name: _hopper.rows(t, K, _GLUON_COLUMNS) for name, t in by_keys.items()},
        tokens=call.tokens, heads=call.heads, per_key=call.heads // call.key_heads, chunks=call.chunks,
        segments=call.segments, C=C, K=K, V=call.V, BV=_GLUON_COLUMNS, EVERY=STATES_EVERY,
        FIRST=int(initial_state is not None), A_STAGES=3, B_STAGES=2, OUTPUT_REGISTERS=112, COPY_REGISTERS=40,
        num_warps=4,
    )  # fmt: skip
    return o, last, states
