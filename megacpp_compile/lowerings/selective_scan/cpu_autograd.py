"""`selective_scan` on a CPU over few tokens: one step after the other, which autograd differentiates.

All steps are one fusion, states in registers, where the reference has a chunk's states in memory for each of its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype

# Where the op comes late, as under a policy, its backward is the other's.
from megacpp_compile.lowerings.selective_scan.reference import selective_scan_backward

__all__ = ["AHEAD", "loses", "selective_scan", "selective_scan_backward", "supports"]

AHEAD = True
# Tokens whose steps are compiled in some ten seconds.
FEW = 32


def supports(name: str, args: Sequence[Any]) -> str | None:
    tokens = args[0].shape[1]
    return None if isinstance(tokens, int) and tokens else "no token, or a number of them that is not known"


def loses(name: str, args: Sequence[Any]) -> str | None:
    return f"more than {FEW} tokens" if args[0].shape[1] > FEW else None


def selective_scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None,
    chunk_size: int, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide, (b, t, d) = compute_dtype(u, dt, A, B, C, D, initial_state), u.shape
    u, dt, A, B, C = (x.to(wide) for x in (u, dt, A, B, C))
    state = u.new_zeros(b, d, A.shape[1]) if initial_state is None else initial_state.to(wide)
    read, states = [], []
    for i in range(t):
        if i % chunk_size == 0:
            states.append(state)
        step = dt[:, i, :, None]
        state = (step * A).exp() * state + step * u[:, i, :, None] * B[:, i, None]
        read.append((state * C[:, i, None]).sum(-1))
    y = torch.stack(read, 1)
    y = y if D is None else y + D.to(wide) * u
    return y.to(out_dtype), state.clone(), torch.stack(states, 1)
