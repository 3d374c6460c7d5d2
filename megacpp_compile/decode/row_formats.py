"""How a cache of latents stores a row: plain."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megacpp_compile.errors import CacheError


class RowFormat(Protocol):
    """What a row of latent and key channels is stored as."""

    @property
    def name(self) -> str: ...

    def components(self, latent_dim: int, rope_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """(width, dtype) of each tensor that has a part of a row."""
        ...

    def encode(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """The components of rows, from latents [..., r] and key rows [..., p]."""
        ...

    def decode(self, stored: tuple[Tensor, ...], latent_dim: int, rope_dim: int) -> Tensor:
        """Rows [..., r + p], of what `encode` returned."""
        ...


class PlainRows:
    """Rows as they come."""

    name = "plain"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def components(self, latent_dim: int, rope_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        return ((latent_dim + rope_dim, self.dtype),)

    def encode(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat((latent, rope), -1),)

    def decode(self, stored: tuple[Tensor, ...], latent_dim: int, rope_dim: int) -> Tensor:
        return stored[0]


def formats_by_layer(
    codec: str | dict[int, str] | None, layers: int, latent_dim: int, rope_dim: int, dtype: torch.dtype, seed: int
) -> list[RowFormat]:
    """The format of each layer, one object for layers of one format. Raises CacheError."""
    if codec is not None:
        raise CacheError("MLAKVCache", "codec None", codec, "Leave it out")
    return [PlainRows(dtype)] * layers
