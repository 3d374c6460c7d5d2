"""`ssd_scan` on a CPU over few tokens: the reference, which autograd differentiates, with chunks one after the other.

The op's backward makes scores and states anew, which takes longer than to keep them where there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacpp_compile.lowerings.ssd_scan import cpu_chunks, reference

# Where the op comes late, as under a policy, its backward is the other's.
from megacpp_compile.lowerings.ssd_scan.cpu_chunks import ssd_scan_backward

__all__ = ["AHEAD", "loses", "ssd_scan", "ssd_scan_backward", "supports"]

AHEAD = True
# Tokens up to which one chunk serves, and up to which autograd's backward is the quicker one.
ONE_CHUNK, FEW = 128, 1024


def _tokens(name: str, args: Sequence[Any]) -> Any:
    return args[0 if name == "ssd_scan" else 2].shape[1]


def supports(name: str, args: Sequence[Any]) -> str | None:
    tokens = _tokens(name, args)
    return None if isinstance(tokens, int) and tokens else "no token, or a number of them that is not known"


def loses(name: str, args: Sequence[Any]) -> str | None:
    return f"more than {FEW} tokens" if _tokens(name, args) > FEW else None


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None,
    chunk_size: int, out_dtype: torch.dtype, seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens = x.shape[1]
    length = tokens if tokens <= min(chunk_size, ONE_CHUNK) else min(chunk_size, cpu_chunks.AT_ONCE)
    y, final, states = reference.ssd_scan(x, dt, A, B, C, D, initial_state, length, out_dtype, seq_idx, across=_in_turn)
    return y, final, states[:, :: max(chunk_size // length, 1)].contiguous()


def _in_turn(k: Any, first: Tensor, added: Tensor) -> Tensor:
    states, over = [first.squeeze(1).expand_as(added[:, 0])], k.over[..., None, None].expand(-1, k.chunks, -1, -1, -1)
    for c in range(k.chunks):
        states.append(over[:, c] * states[-1] + added[:, c])
    return torch.stack(states, 1)
