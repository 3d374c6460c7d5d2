"""Triton device code: the inverse of a unit lower triangular matrix, by halves, on tensor cores.

With D the inverses of the blocks on the diagonal and N what lies below them within pairs of blocks, the pairs' inverses
are D - D N D: N D N = 0. Beginning at blocks of one row every step doubles them, without a power of the matrix, whose
entries grow like binomials (64 equal keys) and would cancel.

Blocks of up to 16 rows are one batch of tiles of 16, the smallest that tensor cores take, whose blocks a mask cuts out.
Above that the whole matrix is multiplied, mostly zeros: cutting its blocks out of registers took longer (H100).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp_compile.lowerings.ssd_scan._triton_gemms import gemm


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, WIDE: tl.constexpr):
    """(I + lower)^-1, float32. lower: float32 [C, C], zero on the diagonal and above it; C is 16, 32 or 64.

    Factors keep 16 bits (`gemm`), with `WIDE` those of float32.
    """
    tiles = _diagonal(lower, C // 16, 16)
    r, c = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(r == c, 1.0, tl.where(r // 2 == c // 2, -tiles, 0.0))
    inverse = _doubled_inside(inverse, tiles, 2, WIDE)
    inverse = _doubled_inside(inverse, tiles, 4, WIDE)
    inverse = _doubled_inside(inverse, tiles, 8, WIDE)
    if C == 16:
        return tl.reshape(inverse, [C, C])
    else:
        i, j = tl.arange(0, C // 16)[:, None, None, None], tl.arange(0, C // 16)[None, None, :, None]
        whole = tl.reshape(tl.where(i == j, inverse[:, :, None, :], 0.0), [C, C])
        whole = _doubled_whole(whole, lower, C, 16, WIDE)
        if C >= 64:
            whole = _doubled_whole(whole, lower, C, 32, WIDE)
        return whole


@triton.jit
def _doubled_inside(inverse, tiles, H: tl.constexpr, WIDE: tl.constexpr):
    """From the inverses of the blocks of H rows on the diagonals of `tiles` [B, 16, 16], those of 2 H."""
    r, c = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    corner = (r // (2 * H) == c // (2 * H)) & (r % (2 * H) >= H) & (c % (2 * H) < H)
    below = tl.where(corner, tiles, 0.0)
    return inverse - gemm(gemm(inverse, below, WIDE), inverse, WIDE)


@triton.jit
def _diagonal(a, B: tl.constexpr, H: tl.constexpr):
    """The B blocks [H, H] on the diagonal of a [B * H, B * H]: [B, H, H]."""
    if B == 1:
        return tl.reshape(a, [1, H, H])
    else:
        i, j = tl.arange(0, B)[:, None, None, None], tl.arange(0, B)[None, None, :, None]
        return tl.sum(tl.where(i == j, tl.reshape(a, [B, H, B, H]), 0.0), 2)


@triton.jit
def _doubled_whole(inverse, lower, C: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr):
    """From the inverses of the blocks of H rows on the diagonal of [C, C], those of 2 H: GEMMs of mostly zeros, but
    tensor cores have time, and cutting blocks out of registers takes more."""
    r, c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    corner = (r // (2 * H) == c // (2 * H)) & (r % (2 * H) >= H) & (c % (2 * H) < H)
    below = tl.where(corner, lower, 0.0)
    return inverse - gemm(gemm(inverse, below, WIDE), inverse, WIDE)
