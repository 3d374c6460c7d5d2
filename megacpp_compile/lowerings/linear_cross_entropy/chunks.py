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
# Of so many chunks the gradients of a weight in bfloat16 are added up in place on CUDA, each sum rounded: at 2048 to
# 131072 that is no further off than eager's, which rounds the logits and their gradient. Of more in float32, which
# holds them twice as wide until the last.
MOST_IN_PLACE = 8
# Rows that a chunk is cut to where there are so many, a tile of a GEMM; and those that fill a GPU with tiles of their
# gradient, where they have so many channels.
TILE, FULL, CHANNELS = 128, 2048, 2048
# Bytes that a row of logits is a multiple of on CUDA: cuBLAS is slow on others.
ALIGNED = 16


def padded(words: int, dtype: torch.dtype) -> int:
    """Words of a row of logits in `dtype`, with those that align it."""
    each = max(1, ALIGNED // dtype.itemsize)
    return -(-words // each) * each


def chunk_rows(
    tokens: int, words: int, itemsize: int, device: torch.device, wide: int = 0, hidden: int = CHANNELS
) -> int:
    """Rows of the longest chunk. wide: bytes that sums of w's gradient take in float32 beside the result, where such a
    sum may be in place. hidden: channels of x."""
    each = max(1, words * itemsize)
    if family({device.type}) is CUDA:
        return min(max(1, tokens), _cuda_rows(tokens, each, wide, hidden))
    most = max(1, {TPU: XLA_BYTES}.get(family({device.type}), CPU_BYTES) // each)
    if tokens <= most:
        return max(1, tokens)
    even = -(-tokens // -(-tokens // most))  # fewer rows where so many chunks are then of one length
    return min(most, -(-even // TILE) * TILE)


def _cuda_rows(tokens: int, each: int, wide: int, hidden: int) -> int:
    """A quarter of the tokens, or as many as make `FULL` rows of `CHANNELS`, as many as fit, and a power of 2, which
    cuBLAS likes best (1280 and 1536 rows take longer than 1024 and 2048); more, where that costs less memory than sums
    in float32. each: bytes of a row of logits."""
    full = FULL * max(1, CHANNELS // max(1, hidden))
    fits = _power_below(min(max(1, CUDA_BYTES // each), max(tokens // 4, full)))
    few = 1 << max(0, -(-tokens // max(1, MOST_IN_PLACE)) - 1).bit_length()
    return few if fits < few and few * each <= fits * each + wide else fits


def _power_below(n: int) -> int:
    """The largest power of 2 that is at most n."""
    return 1 << n.bit_length() - 1


def chunks(
    tokens: int, words: int, itemsize: int, device: torch.device, wide: int = 0, hidden: int = CHANNELS
) -> Iterator[slice]:
    """Slices of tokens, in order."""
    rows = chunk_rows(tokens, words, itemsize, device, wide, hidden)
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the gradient of a weight in `dtype` is kept in between a forward that makes it, of the sum of all tokens'
    losses, and what multiplies it: float16 has not the range for a sum that is yet to be divided."""
    return torch.float32 if dtype == torch.float16 else dtype


def sum_dtype(dtype: torch.dtype, count: int) -> torch.dtype:
    """What gradients of a weight in `dtype` are added up in on CUDA, over so many chunks. float16 is never added to in
    place: sums of many chunks leave its range, and those of few lose their digits."""
    if count <= 1 or dtype == torch.bfloat16 and count <= MOST_IN_PLACE:
        return dtype
    return torch.promote_types(torch.float32, dtype)


def wide_bytes(w: torch.Tensor, grads: str) -> int:
    """`wide` of `chunk_rows`."""
    return 2 * hint(w.shape[0]) * hint(w.shape[1]) if "w" in grads and w.dtype == torch.bfloat16 else 0


def workspace(x: torch.Tensor, w: torch.Tensor, grads: str, dtype: torch.dtype) -> int:
    """Bytes that the op holds while it runs, beside operands and results, of which w's gradient is in `dtype`."""
    tokens, words, hidden = hint(x.shape[0]), hint(w.shape[0]), hint(w.shape[1])
    cuda = family({x.device.type}) is CUDA
    itemsize = x.dtype.itemsize if cuda else compute_dtype(x).itemsize
    width = padded(words, x.dtype) if cuda else words
    rows = chunk_rows(tokens, width, itemsize, x.device, wide_bytes(w, grads) if cuda else 0, hidden)
    logits = rows * width * itemsize
    if not cuda:
        logits = int(AT_ONCE * logits)
    elif width > words:
        logits += width * hidden * itemsize  # w, with the words that pad it
    if "w" not in grads:
        return logits
    own = words * hidden * dtype.itemsize
    added_in = torch.promote_types(dtype, sum_dtype(w.dtype, -(-tokens // rows))) if cuda else compute_dtype(w)
    sums = words * hidden * added_in.itemsize
    # While chunks are added there is no result yet; when it is made there are no logits any more.
    return max(logits + sums - own, sums if sums > own else 0)
