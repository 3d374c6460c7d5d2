"""`compressed_linear` on CUDA: the GEMMs are cuBLAS's, and one kernel writes the signs that they read.

A program makes four words for each of its counters with Triton's Philox, which is the reference's, and unpacks their
bits; so ten rounds are shared by 128 entries. Inductor would repeat them for each entry it fuses into.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_compile.lowerings._kernels.triton_cast import as_stored
from megacpp_compile.lowerings._kernels.triton_launch import Kernel
from megacpp_compile.lowerings.compressed_linear.reference import gradients, projected
from megacpp_compile.lowerings.compressed_linear.signs import ENTRIES, magnitude

__all__ = ["compressed_linear", "compressed_linear_backward"]


@triton.jit
def random_signs(
    out, draw, size, seed_low, seed_high, MAGNITUDE: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = (entry & 0xFFFFFFFF).to(tl.uint32)
    drawn = entry * 0
    if DRAWN:
        drawn += tl.load(draw)
    key = ((entry * 0 + seed_high + (1 << 31)) << 31) + seed_low
    high, third = (entry >> 32).to(tl.uint32), (drawn & 0xFFFFFFFF).to(tl.uint32)
    first, second, third, fourth = tl.philox(key, low, high, third, ((drawn >> 32) & 0xFFFFFFFF).to(tl.uint32))
    bit = tl.arange(0, 32)[None, :]
    at = entry[:, None] * 128 + bit
    for word in tl.static_range(4):
        if word == 0:
            words = first
        elif word == 1:
            words = second
        elif word == 2:
            words = third
        else:
            words = fourth
        minus = (words.to(tl.int64)[:, None] >> bit) & 1
        entries = tl.where(minus == 1, -MAGNITUDE, MAGNITUDE).to(tl.float32)
        tl.store(out + at + 32 * word, as_stored(entries, out), mask=at + 32 * word < size)


_signs = Kernel(random_signs, [{"BLOCK": b, "num_warps": w} for b in (16, 32, 64) for w in (2, 4)], key=("size",))


def signs(rows: int, rank: int, draw: Tensor | None, seed: int, like: Tensor) -> Tensor:
    """`signs.signs` by the kernel."""
    out = torch.empty((rows, rank), dtype=like.dtype, device=like.device)
    # Inductor of torch 2.11 takes no number of more than 32 bits, with a sign, as an argument of a kernel.
    low, high = seed & 0x7FFFFFFF, (seed >> 31) - (1 << 31)
    _signs(
        lambda meta: (triton.cdiv(triton.cdiv(rows * rank, ENTRIES), meta["BLOCK"]),),
        {"BLOCK": 32, "num_warps": 4}, out=out, draw=out if draw is None else draw, size=rows * rank, seed_low=low,
        seed_high=high, MAGNITUDE=magnitude(rank), DRAWN=int(draw is not None),
    )  # fmt: skip
    return out


def compressed_linear(
    x: Tensor, w: list[Tensor], b: list[Tensor], draw: Tensor | None, rank: int, seed: int
) -> tuple[list[Tensor], Tensor]:
    return projected(x, w, b, signs(x.shape[-1], rank, draw, seed, x))


def compressed_linear_backward(
    grad: list[Tensor], z: Tensor, w: list[Tensor], draw: Tensor | None, seed: int, biased: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return gradients(grad, z, w, signs(w[0].shape[1], z.shape[-1], draw, seed, z), biased)
