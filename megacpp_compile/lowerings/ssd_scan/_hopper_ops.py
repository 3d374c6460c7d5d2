"""`ssd_scan` and its backward on Hopper, as ops of their own: Inductor takes no kernels of Gluon.

Registered with the op itself, as a graph from a cache on disk names them where nothing has been lowered. What they do
is in `cuda_triton`, which calls them, and needs Triton. x, B and C are bfloat16.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import kernel_op, shaped_like


@kernel_op("megacpp_ssd::scan")
def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],  # noqa: UP045  kernel_op reads typing.Optional on every supported torch
    initial_state: Optional[Tensor],  # noqa: UP045
    chunk_size: int,
    out_dtype: torch.dtype,
    seq_idx: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and those that enter chunks."""
    from megacpp_compile.lowerings.ssd_scan import cuda_triton

    return cuda_triton.scan_on_hopper((x, dt, A, B, C), D, initial_state, chunk_size, out_dtype, seq_idx)


@torch.library.register_fake("megacpp_ssd::scan")
def _(x, dt, A, B, C, D, initial_state, chunk_size, out_dtype, seq_idx):  # type: ignore[no-untyped-def]
    return promised(x, B, chunk_size, out_dtype, torch.float32)


def promised(
    x: Tensor, B: Tensor, chunk_size: int, out_dtype: torch.dtype, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What `ssd_scan` gives, on no data: y, the last state, and those that enter chunks, both in `wide`."""
    b, t, h, p = x.shape
    state = h, p, B.shape[-1]
    return (
        x.new_empty((b, t, h, p), dtype=out_dtype),
        x.new_empty((b, *state), dtype=wide),
        x.new_empty((b, (t + chunk_size - 1) // chunk_size, *state), dtype=wide),
    )


@kernel_op("megacpp_ssd::backward")
def backward(
    dy: Tensor,
    dfinal: Optional[Tensor],  # noqa: UP045
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],  # noqa: UP045
    initial_state: Optional[Tensor],  # noqa: UP045
    states: Tensor,
    chunk_size: int,
    seq_idx: Optional[Tensor],  # noqa: UP045
    firsts: Optional[list[int]] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the operands; `states`: those that `scan` has given. firsts: those of x, B and C are in one tensor
    [b, t, channels], where they begin at these; it stands in the place of x's, with an empty one for B and C."""
    from megacpp_compile.lowerings.ssd_scan import cuda_triton

    args = dy, dfinal, (x, dt, A, B, C), D, initial_state, states, chunk_size, seq_idx
    if firsts is None:
        return cuda_triton.backward_on_hopper(*args)
    joined = _joined(x, B)
    into = tuple(
        joined[..., at : at + math.prod(t.shape[2:])].unflatten(-1, t.shape[2:])
        for at, t in zip(firsts, (x, B, C), strict=True)
    )
    _, d_dt, d_A, _, _, d_D, d_initial = cuda_triton.backward_on_hopper(*args, into)
    return joined, d_dt, d_A, B.new_empty(0), C.new_empty(0), d_D, d_initial


@torch.library.register_fake("megacpp_ssd::backward")
def _(dy, dfinal, x, dt, A, B, C, D, initial_state, states, chunk_size, seq_idx, firsts=None):  # type: ignore[no-untyped-def]
    if firsts is None:
        return shaped_like(states, (x, dt, A, B, C, D, initial_state))
    d_dt, d_A, d_D, d_initial = shaped_like(states, (dt, A, D, initial_state))
    return _joined(x, B), d_dt, d_A, B.new_empty(0), C.new_empty(0), d_D, d_initial


def _joined(x: Tensor, B: Tensor) -> Tensor:
    """Memory for the gradients of x, B and C side by side."""
    b, t, h, p = x.shape
    return x.new_empty((b, t, h * p + 2 * B.shape[2] * B.shape[3]))
