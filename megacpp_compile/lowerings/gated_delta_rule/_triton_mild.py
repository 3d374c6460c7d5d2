"""Triton: chunks in which no channel decays by much, "mild", whose pairs of tokens take one GEMM in place of one a cut.

Their factors are 2^(G - G_m) and 2^(G_m - G), with G_m of the last row of the chunk's first half. One of the two grows,
so that this serves where no channel decays by more than 2^MOST over half a chunk. One kernel is launched for the mild
chunks and one for the others, each of which leaves the other's alone: both in one spill registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.gated_delta_rule._triton_tiles import LOG2_E, chunk_tokens

# In powers of 2. Gradients as small as 2^-40 times the smaller factor are still above float32's smallest numbers.
MOST = tl.constexpr(64.0)


@triton.jit
def delta_mild_chunks(g, places, mild, tokens, heads, chunks, g_b, g_t, g_h, C: tl.constexpr, K: tl.constexpr,
                      DOCUMENTS: tl.constexpr):  # fmt: skip
    """mild [b, chunks, heads], int32: whether a chunk of gates g [b, tokens, heads, K] is."""
    c, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, end = chunk_tokens(places, c, tokens, C, DOCUMENTS)
    t = first.to(tl.int64) + tl.arange(0, C)
    g += b * g_b + h * g_h + t[:, None] * g_t + tl.arange(0, K)[None, :]
    decay = tl.abs(tl.load(g, mask=(t < end)[:, None], other=0).to(tl.float32)) * LOG2_E
    early = (tl.arange(0, C) < C // 2)[:, None]
    first_half, second = tl.sum(tl.where(early, decay, 0.0), 0), tl.sum(tl.where(early, 0.0, decay), 0)
    steepest = tl.max(tl.maximum(first_half, second), 0)
    tl.store(mild + (b * chunks + c) * heads + h, (steepest <= MOST).to(tl.int32))


@triton.jit
def served_elsewhere(mild, row, MILD: tl.constexpr, SKIP: tl.constexpr):
    """Whether a chunk is another launch's. MILD: this is that of mild chunks; SKIP: of the others. Neither: of all."""
    if MILD:
        return tl.load(mild + row) == 0
    elif SKIP:
        return tl.load(mild + row) != 0
    else:
        return row < 0


mild_chunks = Kernel(delta_mild_chunks, [{"num_warps": w, "num_stages": 1} for w in (4, 8)], key=("heads", "C", "K"))
