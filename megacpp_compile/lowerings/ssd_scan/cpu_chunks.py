"""`ssd_scan` on a CPU: the reference in chunks of at most 64 tokens, whatever the op's are.

What is quadratic in a chunk, decays and scores, is most of the work there and is read from caches; `states` are those
that enter the op's chunks, and backward makes those between anew. Of very many tokens the op's own chunks serve, as
carrying states is quadratic in how many chunks there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings.ssd_scan import reference

AT_ONCE, MOST_TOKENS = 64, 8192


def _length(tokens: Any, chunk_size: int) -> int:
    return min(chunk_size, AT_ONCE) if hint(tokens) <= MOST_TOKENS else chunk_size


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None,
    chunk_size: int, out_dtype: torch.dtype, seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    length = _length(x.shape[1], chunk_size)
    y, final, states = reference.ssd_scan(x, dt, A, B, C, D, initial_state, length, out_dtype, seq_idx)
    return y, final, states[:, :: chunk_size // length].contiguous()


def ssd_scan_backward(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    initial_state: Tensor | None, states: Tensor, chunk_size: int, seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    length = _length(x.shape[1], chunk_size)
    if length < chunk_size:  # a graph drops what makes y
        states = reference.ssd_scan(x, dt, A, B, C, None, initial_state, length, states.dtype, seq_idx)[2]
    return reference.ssd_scan_backward(dy, dfinal, x, dt, A, B, C, D, initial_state, states, length, seq_idx)
