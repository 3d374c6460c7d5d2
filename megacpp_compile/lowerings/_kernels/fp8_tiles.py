"""Rounding to fp8 with a scale for every tile of a matrix: DeepSeek-V3's recipe (https://arxiv.org/abs/2412.19437,
section 3.3) scales 1 x 128 of an activation, 128 x 128 of a weight, 128 x 1 where a GEMM sums over tokens.

A tile is `rows` x `columns`. Sizes that are no multiple leave smaller tiles at the ends. A matrix [..., r, k] has
scales [..., ceil(r / rows), ceil(k / columns)].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp_compile.lowerings._kernels.fp8 import rounded_by, scale_from, widened


def _tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """x as [..., r / rows, rows, k / columns, columns], padded with zeros."""
    r, k = x.shape[-2:]
    if (over := (-r % rows, -k % columns)) != (0, 0):
        x = F.pad(x, (0, over[1], 0, over[0]))
    return x.unflatten(-1, (-(-k // columns), columns)).unflatten(-3, (-(-r // rows), rows))


def _matrix(tiles: Tensor, like: Tensor) -> Tensor:
    """The matrix that `_tiles` cut up, of the size of `like`."""
    return tiles.flatten(-2).flatten(-3, -2)[..., : like.shape[-2], : like.shape[-1]]


def _of_tiles(scale: Tensor) -> Tensor:
    """Scales as [..., r / rows, 1, k / columns, 1], which broadcast over `_tiles`."""
    return scale.unsqueeze(-2).unsqueeze(-1)


def rounded_by_tiles(x: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, of x's shape; one scale per tile."""
    return _matrix(rounded_by(_tiles(x, rows, columns), _of_tiles(scale), dtype), x)


def round_by_tiles(
    x: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(payload of x's shape, scales in x's dtype): a tile's largest magnitude becomes the dtype's largest number."""
    scale = scale_from(_tiles(x, rows, columns).abs().amax((-3, -1)), dtype)
    return rounded_by_tiles(x, scale, rows, columns, dtype), scale


def widened_by_tiles(payload: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """payload * scale in `dtype`; for use inside an op, whose operands stay fp8 in memory."""
    return _matrix(_tiles(widened(payload, dtype), rows, columns) * _of_tiles(scale.to(dtype)), payload)
