"""`ssd_scan` on Hopper: its walks, the scores' gradient and B's in Gluon, the rest in Triton, as ops of their own
(`_hopper_ops`), for Inductor takes no kernels of Gluon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.gluon_launch import launch
from megacpp_compile.lowerings._kernels.hopper import CHUNK, GluonKernels, lacking, rows, side_by_side, tokens
from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens
from megacpp_compile.lowerings.ssd_scan._call import LANES, ScanOperands
from megacpp_compile.lowerings.ssd_scan._gradients import ChunkGradients

# A head of 64 channels takes a quarter of the time of one of 128 with states of 128 x 128, and the host as long.
LEAST = 2

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor  # launches take it

    from megacpp_compile.lowerings.ssd_scan._gluon_key_grad import ssd_key_grad_hopper
    from megacpp_compile.lowerings.ssd_scan._gluon_pairs import ssd_scores_grad_hopper
    from megacpp_compile.lowerings.ssd_scan._gluon_walk import ssd_walk_hopper

    kernels = GluonKernels("", LEAST)
except (ImportError, AttributeError) as error:
    kernels = GluonKernels(lacking(error))

# A head's channels, and numbers of a state for each.
CHANNELS, STATE_SIZES = 64, (64, 128)
# Tokens of a chunk of backward: at the ends of these it has states in memory.
BACKWARD_CHUNK = 128
# So many programs of a walk a GPU takes at once.
PROGRAMS = 264
# Registers of the scores' gradient, so that three programs share a multiprocessor.
PAIR_REGISTERS = 168


def serve(call: ScanOperands, rows_dtype: torch.dtype) -> bool:
    """Whether these kernels take a call whose y, or its gradient, is of that dtype."""
    return (
        {call.x.dtype, call.B.dtype, call.C.dtype} == {torch.bfloat16}
        and rows_dtype in (torch.bfloat16, torch.float32)
        and call.p == CHANNELS
        and call.n in STATE_SIZES
        and call.chunk % CHUNK == 0
        and kernels.serve(call.x.device, call.batch * call.heads * call.chunks_of(CHUNK))
    )


def walk(
    call: ScanOperands, v: Tensor, skip: Tensor | None, first: Tensor | None, chunk: int, out: Tensor | None,
    reverse: bool,
    decays: tuple[Tensor, Tensor], cuts: dict[str, Any], made: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """`ScanOperands.walk` into `made`, which `ScanOperands.walked` gives. cuts: of chunks of CHUNK tokens, as
    decays."""
    (q, k), (decay, steps), N = call.read_and_written(reverse), decays, call.n
    launch(
        ssd_walk_hopper, (call.p // LANES, call.heads, call.batch), q=tokens(q, N), k=tokens(k, N),
        v=tokens(v, LANES), out=tokens(v if out is None else out, LANES), decay=decay, steps=steps,
        **_packed(call, cuts), **call.ends(skip, first, *made), heads=call.heads, chunks=call.chunks_of(CHUNK),
        per_group=call.heads // call.groups, every=chunk // CHUNK, kept=call.chunks_of(chunk), L=CHUNK, P=call.p, N=N,
        REVERSE=int(reverse), ROWS=int(out is not None), STAGES=2, num_warps=4,
    )  # fmt: skip


def forward(call: ScanOperands, D: Tensor | None, initial_state: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
    """Writes y; the states that enter chunks, and the last."""
    made = call.walked(call.chunk)
    walk(call, call.x, D, initial_state, call.chunk, y, False, call.decay(CHUNK), call.cuts(CHUNK), made)
    return made


def backward(
    call: ScanOperands, dy: Tensor, dfinal: Tensor | None, D: Tensor | None, initial_state: Tensor | None,
    states: Tensor,
    d_x: Tensor, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Writes d_x; the gradient of the first state, and those of dt, A, B, C and D. states: those forward has kept.
    into: as `ChunkGradients`."""
    dy, decays, cuts = in_sixteens(dy), call.decay(CHUNK), call.cuts(CHUNK)
    entering = (states.contiguous(), states) if call.chunk == BACKWARD_CHUNK else call.walked(BACKWARD_CHUNK)
    left = call.walked(BACKWARD_CHUNK)

    def back() -> None:
        walk(call, dy, D, dfinal, BACKWARD_CHUNK, d_x, True, decays, cuts, left)

    def forth() -> None:
        if call.chunk != BACKWARD_CHUNK:
            walk(call, call.x, None, initial_state, BACKWARD_CHUNK, None, False, decays, cuts, entering)

    if call.batch * call.heads * call.p // LANES <= PROGRAMS // 2:
        side_by_side(call.x.device, back, forth)
    else:
        back()
        forth()
    made = ChunkGradients(call, dy, entering[0], left[0], BACKWARD_CHUNK, into)
    _of_scores(made)
    made.of_queries()
    _of_keys(made)
    made.of_steps()
    return left[1], made.results()


def _packed(call: ScanOperands, cuts: dict[str, Any]) -> dict[str, Any]:
    """What tells documents apart, as `ScanOperands.cuts` gives it; of a call without any it is not read."""
    return {"cuts": call.A if cuts["cuts"] is None else cuts["cuts"], "PACKED": cuts["PACKED"]}


def _common(made: ChunkGradients) -> dict[str, Any]:
    call = made.call
    return {"x": call.x, "B": call.B, "C": call.C, "d_scores": made.d_scores, "decay": made.decay,
            "steps": made.steps, "heads": call.heads, "chunks": call.chunks_of(made.length),
            "per_group": made.per_group, "parts": made.parts, "L": made.length, "P": call.p, "N": call.n,
            "HB": made.at_once, **_packed(call, made.packed)}  # fmt: skip


def _of_scores(made: ChunkGradients) -> None:
    """As `ChunkGradients.of_scores`, of halves of chunks, and of what is across them by itself."""
    call, common = made.call, _common(made)
    by_head = (call.batch, call.chunks_of(made.length), call.heads)
    made.d_skip, made.across = call.new(*by_head, 2), call.new(*by_head, made.length)
    common |= {"x": tokens(call.x, call.p), "B": tokens(call.B, call.n), "C": tokens(call.C, call.n)}
    launch(
        ssd_scores_grad_hopper, (3 * call.chunks_of(made.length), made.parts, call.batch), dy=tokens(made.dy, call.p),
        row_sums=made.row_sums, column_sums=made.column_sums, across=made.across, diagonal=made.diagonal,
        d_skip=made.d_skip, **common, num_warps=4, maxnreg=PAIR_REGISTERS,
    )  # fmt: skip


def _of_keys(made: ChunkGradients) -> None:
    call, common, L = made.call, _common(made), made.length
    common |= {"x": tokens(call.x, call.p, L), "B": tokens(call.B, call.n, L), "C": tokens(call.C, call.n, L)}
    launch(
        ssd_key_grad_hopper, (call.chunks_of(L), made.parts, call.batch), left=rows(made.left, call.p, call.n),
        entering=rows(made.states, call.p, call.n), d_B=tokens(made.d_B, call.n, L), dots=made.key_dots,
        inner=made.inner, **common, num_warps=8,
    )  # fmt: skip
