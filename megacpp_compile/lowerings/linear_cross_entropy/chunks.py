"""How many tokens' logits are made at a time, and what memory that takes.

More of them cost memory, fewer cost time: the gradient of w is read and written once a chunk, and a GEMM of few rows
does not fill a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megacpp_compile.fx.sizes import hint
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.targets import CUDA, TPU, family

# Bytes of logits in a chunk, in the dtype that they are kept in.
CUDA_BYTES = 512 << 20
XLA_BYTES = 256 << 20
CPU_BYTES = 64 << 20
# Times those bytes that the reference has at once: logits, their gradient in three steps, and a mask.
AT_ONCE = 4.25
# What several chunks' gradients of a weight in half precision are added up in on CUDA: torch.float32, which holds them
# twice as wide until the last, or None for the weight's own dtype, which rounds once a chunk.
ACCUMULATE: torch.dtype | None = torch.float32
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


def sum_dtype(dtype: torch.dtype, several: bool) -> torch.dtype:
    """What gradients of a weight in `dtype` are added up in on CUDA. float16 is never added to in place: sums of many
    chunks leave its range, and those of few lose their digits."""
    if not several:
        return dtype
    return torch.promote_types(torch.float32 if dtype == torch.float16 else ACCUMULATE or dtype, dtype)


def workspace(x: torch.Tensor, w: torch.Tensor, grads: str) -> int:
    """Bytes that the op holds while it runs, beside operands and results."""
    tokens, words, hidden = hint(x.shape[0]), hint(w.shape[0]), hint(w.shape[1])
    cuda = family({x.device.type}) is CUDA
    itemsize = x.dtype.itemsize if cuda else compute_dtype(x).itemsize
    rows = chunk_rows(tokens, words, itemsize, x.device)
    logits = rows * words * itemsize
    if not cuda:
        logits = int(AT_ONCE * logits)
    if "w" not in grads:
        return logits
    own = words * hidden * w.dtype.itemsize
    sums = words * hidden * (sum_dtype(w.dtype, tokens > rows) if cuda else compute_dtype(w)).itemsize
    # While chunks are added there is no result yet; when it is made there are no logits any more.
    return max(logits + sums - own, sums if sums > own else 0)
