"""`ssd_scan` on CUDA in Triton: chunk by chunk, with the states that enter the chunks the only intermediate in memory.

Forward is one walk over the chunks of a head, its state in registers (behind a pass over the steps): y, and a state in
memory every `chunk_size` tokens. Backward walks the other way for the gradients of the states and of x. Then, chunks
side by side, the scores' gradients are summed over the heads of a group before B and C multiply them, and what the
decays are due is summed from behind. No atomics: equal inputs give equal bits.

Documents are counted within each chunk first (`ssd_cuts`), 4 bytes a token for all heads. Where the counts of two
tokens differ, the logarithm of the decay between them is -inf. Without documents the kernels' code has none of this.

Those last kernels' chunks are at most `longest` tokens. Where the caller's are longer, fewer states are kept, and
backward walks forward once more for those in between.

On Hopper most of it is in Gluon (`_hopper`), with the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.columns import Columns
from megacpp_compile.lowerings._kernels.triton_launch import MOST_BLOCKS, in_sixteens, unfit
from megacpp_compile.lowerings.ssd_scan import _gradients, _hopper
from megacpp_compile.lowerings.ssd_scan._call import ScanOperands

__all__ = ["ssd_scan", "ssd_scan_backward", "supports", "writes_into"]

HEAD_SIZES = (16, 32, 64, 128)
STATE_SIZES = (16, 32, 64, 128, 256)
# Results of backward that Hopper's kernels write side by side: the gradients of x, B and C, which a mixer makes of one.
_JOINED = (0, 3, 4)


def supports(name: str, args: Sequence[Any]) -> str | None:
    """Why the kernels cannot serve this call, or None."""
    x, dt, A, B, C, D, initial_state = args[2:9] if name == "ssd_scan_backward" else args[:7]
    sizes = (*x.shape[2:], *B.shape[2:])
    if (why := unfit((x, dt, A, B, C, D, initial_state), sizes)) is not None:
        return why
    heads, p, groups, n = sizes
    if p not in HEAD_SIZES or n not in STATE_SIZES:
        return f"heads of {p} with states of {n}: kernels have {HEAD_SIZES} and {STATE_SIZES}"
    if heads > MOST_BLOCKS or isinstance(x.shape[0], int) and x.shape[0] > MOST_BLOCKS:
        return f"more than {MOST_BLOCKS} heads or sequences"
    return None


def writes_into(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    if name != "ssd_scan_backward":
        return ()
    dy, _, x, dt, A, B, C, _, _, _, chunk_size, *seq_idx = args
    call = ScanOperands(x, dt, A, B, C, chunk_size, next(iter(seq_idx), None))
    return _JOINED if _hopper.serve(call, dy.dtype) else ()


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
    out_dtype: torch.dtype,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = ScanOperands(x, dt, A, B, C, chunk_size, seq_idx)
    if _hopper.serve(call, out_dtype):
        return torch.ops.megacpp_ssd.scan(x, dt, A, B, C, D, initial_state, chunk_size, out_dtype, seq_idx)
    return _scan(call, D, initial_state, out_dtype)


def _scan(
    call: ScanOperands, D: Tensor | None, initial_state: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    y = call.new(*call.x.shape, dtype=out_dtype)
    states, final = call.walk(call.x, D, initial_state, call.chunk, y, reverse=False)
    return y, final, states


def ssd_scan_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    into: Mapping[int, Columns] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = ScanOperands(x, dt, A, B, C, chunk_size, seq_idx)
    if _hopper.serve(call, dy.dtype):
        args = dy, dfinal, x, dt, A, B, C, D, initial_state, states, chunk_size, seq_idx
        if into is None:
            return torch.ops.megacpp_ssd.backward(*args)
        firsts = [into[result].first for result in _JOINED]
        joined, d_dt, d_A, _, _, d_D, d_initial = torch.ops.megacpp_ssd.backward(*args, firsts)
        return joined, d_dt, d_A, joined, joined, d_D, d_initial
    return _backward(call, dy, dfinal, D, initial_state, states)


def _backward(
    call: ScanOperands, dy: Tensor, dfinal: Tensor | None, D: Tensor | None, initial_state: Tensor | None,
    states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dy, chunk = in_sixteens(dy), min(call.chunk, _gradients.longest(call.p, call.n, call.wide))
    if chunk < call.chunk:
        states, _ = call.walk(call.x, None, initial_state, chunk, None, reverse=False)
    d_x = call.new(*call.x.shape, dtype=call.x.dtype)
    left, d_initial = call.walk(dy, D, dfinal, chunk, d_x, reverse=True)
    grads = _gradients.in_triton(call, dy, states.contiguous(), left, chunk)
    return _all(d_x, grads, d_initial, D, initial_state)


def _all(
    d_x: Tensor, grads: tuple[Tensor, ...], d_initial: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op's results, empty where there is no operand; grads: those of dt, A, B, C and D."""
    d_dt, d_A, d_B, d_C, d_D = grads
    d_D = d_D.new_empty(0) if D is None else d_D.to(D.dtype)
    d_initial = d_initial.new_empty(0) if initial_state is None else d_initial.to(initial_state.dtype)
    return d_x, d_dt, d_A, d_B, d_C, d_D, d_initial


# --- on Hopper


def _call(operands: tuple[Tensor, ...], chunk_size: int, seq_idx: Tensor | None) -> ScanOperands:
    x, dt, A, B, C = operands
    return ScanOperands(x, dt, A, B, C, chunk_size, seq_idx)


def scan_on_hopper(
    operands: tuple[Tensor, ...], D: Tensor | None, initial_state: Tensor | None, chunk_size: int,
    out_dtype: torch.dtype, seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the op `megacpp_ssd::scan` does. operands: x, dt, A, B and C."""
    call = _call(operands, chunk_size, seq_idx)

    def in_gluon() -> tuple[Tensor, Tensor, Tensor]:
        y = call.new(*call.x.shape, dtype=out_dtype)
        states, final = _hopper.forward(call, D, initial_state, y)
        return y, final, states

    def in_triton() -> tuple[Tensor, Tensor, Tensor]:
        return _scan(call, D, initial_state, out_dtype)

    return in_triton() if call.empty else _hopper.kernels.or_in_triton("ssd_scan", in_gluon, in_triton)


def backward_on_hopper(
    dy: Tensor, dfinal: Tensor | None, operands: tuple[Tensor, ...], D: Tensor | None, initial_state: Tensor | None,
    states: Tensor, chunk_size: int, seq_idx: Tensor | None, into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the op `megacpp_ssd::backward` does. into: memory for the gradients of x, B and C."""
    call = _call(operands, chunk_size, seq_idx)

    def in_gluon() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        d_x = call.new(*call.x.shape, dtype=call.x.dtype) if into is None else into[0]
        d_initial, grads = _hopper.backward(call, dy, dfinal, D, initial_state, states, d_x, into and into[1:])
        return _all(d_x, grads, d_initial, D, initial_state)

    def in_triton() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        made = _backward(call, dy, dfinal, D, initial_state, states)
        for there, result in zip(into or (), _JOINED, strict=False):
            there.copy_(made[result])
        return made

    return in_triton() if call.empty else _hopper.kernels.or_in_triton("ssd_scan_backward", in_gluon, in_triton)
