"""Triton: the list of chunks of large decay, and how kernels by cuts walk over it.

A program by cuts fills an SM, or half of one, so that thousands which only find their chunk to be of small decay take
several times as long as a launch. There are few, and each walks over its part of a list whose length only the device
knows. Which program has a chunk makes no difference: chunks read nothing of one another, and each number has one
writer.

The walks disable_licm: what is made of a tile's rows alone would be kept in registers from one chunk to the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_launch import Kernel


@triton.jit
def delta_large_decay_chunks(small_decay, large_decay, chunks, heads, count, ROWS: tl.constexpr):
    """large_decay int32 [1 + count]: how many of small_decay [b, chunks, heads] are 0, and behind that which, for
    `nth_chunk`.

    One program, ROWS at a time: without atomics, and in order. Chunks run fastest, as elsewhere (`chunk_and_head`).
    """
    found = 0
    for begin in range(0, count, ROWS):
        i = begin + tl.arange(0, ROWS)
        head = i // chunks
        at = (head // heads * chunks + i % chunks) * heads + head % heads
        those = (tl.load(small_decay + at, mask=i < count, other=1) == 0).to(tl.int32)
        tl.store(large_decay + found + tl.cumsum(those, 0), i, mask=those != 0)
        found += tl.sum(those, 0)
    tl.store(large_decay, found)


@triton.jit
def share(large_decay, SKIP: tl.constexpr):
    """What a program walks over: where it starts and stops, and its stride. Without SKIP a program has one chunk, and
    the compiler leaves the walk out."""
    start = tl.program_id(0)
    if SKIP:
        return start, tl.load(large_decay), tl.num_programs(0)
    else:
        return start, start + 1, 1


@triton.jit
def nth_chunk(large_decay, i, chunks, heads, SKIP: tl.constexpr):
    """The chunk of a sequence, and its head and sequence (64 bits)."""
    if SKIP:
        i = tl.load(large_decay + 1 + i)
    head = i // chunks
    return i % chunks, (head % heads).to(tl.int64), (head // heads).to(tl.int64)


large_decay_chunks = Kernel(
    delta_large_decay_chunks, [{"num_warps": w, "num_stages": 1, "ROWS": 4096} for w in (8, 16)], key=("heads",)
)
