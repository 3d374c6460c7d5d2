"""Rows' gradients in a fixed order, without atomics: what each pair of a query and a row adds is stored, and then
summed by rows, along lists of the pairs that name them.

A stable sort makes the lists, so a row's pairs come in the order of queries. All that pairs add would be some 20 GB at
8192 queries of 2048 rows: queries are taken a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megacpp_compile.lowerings.sparse_mla.reference import last_seen, named

# Bytes that what the pairs of some queries add may take.
PART_BYTES = 2 << 30


def part_dtype(dtype: torch.dtype) -> torch.dtype:
    """What pairs' parts are stored in: bfloat16 has the range of their sum's float32, float16 has not."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def shares(q: Tensor, indices: Tensor) -> Iterator[slice]:
    """Slices of queries whose parts fit into PART_BYTES; multiples of 16, for which Triton compiles kernels once."""
    per_query = q.shape[0] * indices.shape[-1] * q.shape[-1] * part_dtype(q.dtype).itemsize
    at_once = max(1, PART_BYTES // per_query)
    at_once -= at_once % 16 if at_once > 16 else 0
    for start in range(0, q.shape[1], at_once):
        yield slice(start, min(start + at_once, q.shape[1]))


def by_row(indices: Tensor, rows: int, causal: bool, offset: int) -> tuple[Tensor, Tensor]:
    """Of the pairs of [b, t, 1, k]: their numbers sorted by the row they name, int64, and where each of the b * s rows'
    begin, and the last one's end, [b * s + 1]. Pairs that are not valid come last."""
    index = indices.squeeze(2)
    valid = named(index, rows, last_seen(index.shape[1], causal, offset, index))
    first = torch.arange(index.shape[0], device=index.device, dtype=index.dtype)[:, None, None] * rows
    count = index.shape[0] * rows
    # Sorting takes a pass for every byte.
    key = torch.where(valid, index + first, count).to(torch.int16 if count < 2**15 else torch.int32).flatten()
    ordered, pairs = torch.sort(key, stable=True)
    each = torch.arange(count + 1, device=index.device, dtype=key.dtype)
    return pairs, torch.searchsorted(ordered, each)
