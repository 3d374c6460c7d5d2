"""How many tokens' logits are made at a time.

More of them cost memory, fewer cost time: the gradient of w is read and written once a chunk, and a GEMM of few rows
does not fill a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megacpp_compile.targets import CUDA, TPU, family

# Bytes of logits in a chunk, in the dtype that they are kept in.
CUDA_BYTES = 512 << 20
XLA_BYTES = 256 << 20
CPU_BYTES = 64 << 20
# Chunks are a multiple of so many rows, a tile of a GEMM, where they are that long.
TILE = 128


def chunk_rows(tokens: int, words: int, itemsize: int, device: torch.device) -> int:
    """Rows of the longest chunk: as many as fit, or fewer where so many chunks are then of one length."""
    most = max(1, {CUDA: CUDA_BYTES, TPU: XLA_BYTES}.get(family({device.type}), CPU_BYTES) // max(1, words * itemsize))
    if tokens <= most:
        return max(1, tokens)
    even = -(-tokens // -(-tokens // most))
    return min(most, -(-even // TILE) * TILE)


def chunks(tokens: int, words: int, itemsize: int, device: torch.device) -> Iterator[slice]:
    """Slices of tokens, in order."""
    rows = chunk_rows(tokens, words, itemsize, device)
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))
