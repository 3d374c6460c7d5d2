"""`compressed_linear` and its backward in plain PyTorch: their meaning, their lowering on CPU and XLA, the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.lowerings.compressed_linear.signs import magnitude, signs

# Inductor computes what it fuses anew for each of its readers, and each word of a round has several: ten rounds would
# be written out a million times.
TRACED = False


def compressed_linear(
    x: Tensor, w: list[Tensor], b: list[Tensor], draw: Tensor | None, rank: int, seed: int
) -> tuple[list[Tensor], Tensor]:
    return projected(x, w, b, signs(x.shape[-1], rank, draw, seed, x))


def compressed_linear_backward(
    grad: list[Tensor], z: Tensor, w: list[Tensor], draw: Tensor | None, seed: int, biased: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return gradients(grad, z, w, signs(w[0].shape[1], z.shape[-1], draw, seed, z), biased)


def projected(x: Tensor, w: list[Tensor], b: list[Tensor], s: Tensor) -> tuple[list[Tensor], Tensor]:
    """y and z, with the signs `s`."""
    return [F.linear(x, one, b[i] if b else None) for i, one in enumerate(w)], torch.matmul(x, s)


def gradients(
    grad: list[Tensor], z: Tensor, w: list[Tensor], s: Tensor, biased: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of x, w, and of the biases, with the signs `s`."""
    rank, wide = z.shape[-1], compute_dtype(z)
    flat, kept = [g.flatten(0, -2) for g in grad], z.flatten(0, -2)
    d_x = flat[0] @ w[0]
    for g, one in zip(flat[1:], w[1:], strict=True):
        d_x = d_x + g @ one
    # 1 where rank is a power of 4. Not of S, whose entries it would round alike, all to one side.
    scale = 1 / (rank * magnitude(rank) ** 2)
    d_w = [((g.t() @ kept).to(wide) * scale).to(z.dtype) @ s.t() for g in flat]
    d_b = [g.to(wide).sum(0).to(g.dtype) for g in flat] if biased else []
    return d_x.unflatten(0, z.shape[:-1]), d_w, d_b
