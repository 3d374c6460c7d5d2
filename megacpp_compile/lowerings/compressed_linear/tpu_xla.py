"""`compressed_linear` for XLA: the reference, with the rounds of its generator as one `while` loop.

Written out, ten rounds in which every word is read several times are a program that XLA takes minutes to compile where
a graph holds two of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp_compile.lowerings._kernels.xla_loop import Tensors, loop
from megacpp_compile.lowerings.compressed_linear.reference import gradients, projected
from megacpp_compile.lowerings.compressed_linear.signs import ROUNDS, counters, key, round_of, signs_of

__all__ = ["compressed_linear", "compressed_linear_backward"]

TRACED = False  # no ATen graph has a loop


def signs(rows: int, rank: int, draw: Tensor | None, seed: int, like: Tensor) -> Tensor:
    """`signs.signs`, the rounds in a loop."""

    def body(words: Tensors, number: Tensors) -> tuple[Tensors, Tensors]:
        return round_of(words, key(seed, number[0])), ()  # type: ignore[arg-type]

    words, _ = loop(body, counters(rows * rank, draw, like.device), (torch.arange(ROUNDS, device=like.device),))
    return signs_of(words, rows, rank, like)  # type: ignore[arg-type]


def compressed_linear(
    x: Tensor, w: list[Tensor], b: list[Tensor], draw: Tensor | None, rank: int, seed: int
) -> tuple[list[Tensor], Tensor]:
    return projected(x, w, b, signs(x.shape[-1], rank, draw, seed, x))


def compressed_linear_backward(
    grad: list[Tensor], z: Tensor, w: list[Tensor], draw: Tensor | None, seed: int, biased: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return gradients(grad, z, w, signs(w[0].shape[1], z.shape[-1], draw, seed, z), biased)
