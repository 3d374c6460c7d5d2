"""`rope_qk` in plain PyTorch: its meaning, its CPU lowering, and the oracle of every other lowering."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.rotation import by_sequence, rotate, rotate_head


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    interleaved_in: bool,
    interleaved_out: bool,
    rope_first: bool,
    inverse: bool,
    out_dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
    turn: Callable[..., Tensor] = rotate,
) -> tuple[Tensor, Tensor]:
    cos, sin = (by_sequence(t, cu_seqlens, q.shape[0]) for t in (cos, sin))
    flags = (nope_dim, interleaved_in, interleaved_out, rope_first, inverse, out_dtype, turn)
    return rotate_head(q, cos, sin, *flags), rotate_head(k, cos, sin, *flags)
