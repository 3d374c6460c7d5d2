"""The one sequential part of `gated_delta_rule`'s backward: gradients of the states that leave chunks, and of R.

In Gluon on Hopper (`_gluon_reverse_walk`); elsewhere, and of what that does not take, in Triton
(`_triton_reverse_walk`).
"""

from __future__ import annotations

from torch import Tensor

from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.triton_launch import strides
from megacpp_compile.lowerings.gated_delta_rule import _hopper, _triton_reverse_walk
from megacpp_compile.lowerings.gated_delta_rule._backward_call import COLUMNS, STAGES, BackwardOperands, only

# Of V's channels a program of Gluon's walk has so many.
_GLUON_COLUMNS = 64


def results(call: BackwardOperands) -> dict[str, Tensor]:
    """d_states [b, c, h, K, V], d_rows [b, c, h, C, V], and d_initial [documents, h, K, V] in float32."""
    return {
        "d_states": call.by_chunk(call.heads, call.K, call.V, dtype=call.inner),
        "d_rows": call.by_chunk(call.heads, call.C, call.V, dtype=call.inner),
        "d_initial": call.new(call.sequences, call.heads, call.K, call.V),
    }


def _last(call: BackwardOperands, dfinal: Tensor | None, out: dict[str, Tensor]) -> Tensor:
    """The gradient of the last state, or what takes its place where there is none."""
    return out["d_initial"] if dfinal is None else dfinal.contiguous()


def in_triton(
    call: BackwardOperands, dfinal: Tensor | None, inverse: Tensor, made: dict[str, Tensor], out: dict[str, Tensor]
) -> None:
    """Into `out`. made: what `prepare` has written, by the names it has there."""
    columns = call.at_once(COLUMNS)
    _triton_reverse_walk.reverse_walk(
        lambda meta: (call.V // columns, call.heads, call.sequences),
        {"num_warps": 4, "num_stages": call.stages(STAGES)}, BV=columns, do=call.do, inverse=inverse,
        documents=call.packed.documents if call.packed else call.nothing, last=_last(call, dfinal, out),
        per_key=call.per_state, scale=call.scale, CHANNELS=int(call.per_channel), LAST=int(dfinal is not None), **out,
        # Triton makes a constant of a 1, and ptxas 12.8 wrong rows of a walk that has a single round for sure.
        behind_last=call.chunks + 1,
        **only(made, "q k out_keys scores_t decay steps norms ends"), **strides("q", made["q"], "bth"),
        **strides("k", made["k"], "bth"), **call.strides_of("do"), **call.common,
    )  # fmt: skip


def in_gluon(
    call: BackwardOperands, dfinal: Tensor | None, inverse: Tensor, made: dict[str, Tensor], out: dict[str, Tensor]
) -> None:
    """The same, without documents."""
    C, K, columns = _hopper.CHUNK, _hopper.CHANNELS, _GLUON_COLUMNS
    by_tokens = {"q": (made["q"], K), "k": (made["k"], K), "out_keys": (made["out_keys"], K),
                 "do": (call.do, columns), "inverse": (inverse, C)}  # fmt: skip
    launch(
        _hopper.delta_reverse_walk, (call.V // columns, call.heads, call.batch),
        **{name: _hopper.tokens(t, lanes) for name, (t, lanes) in by_tokens.items()},
        scores_t=_hopper.rows(made["scores_t"], C, C), d_rows=_hopper.rows(out["d_rows"], C, columns),
        d_states=_hopper.rows(out["d_states"], K, columns), last=_last(call, dfinal, out), d_initial=out["d_initial"],
        **only(made, "decay steps norms ends"), chunks=call.chunks, heads=call.heads, per_key=call.per_state,
        scale=call.scale, C=C, K=K, V=call.V, BV=columns, CHANNELS=int(call.per_channel), LAST=int(dfinal is not None),
        STAGES=2 if call.per_channel else 3, COPY_REGISTERS=40, num_warps=4,
    )  # fmt: skip
