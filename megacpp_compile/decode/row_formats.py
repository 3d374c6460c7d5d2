"""How a cache of latents stores a row: plain."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

# Registers the op, here and not where it is called: Dynamo traces that.
import megacpp_compile.lowerings.mla_decode  # noqa: F401
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

    def attend(
        self, queries: Tensor, stored: tuple[Tensor, ...], length: Tensor, scale: float, latent_dim: int
    ) -> Tensor:
        """[b, t, h, r]: absorbed attention of queries [b, t, h, r + p] over stored rows, `length` [b] of them valid."""
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

    def attend(
        self, queries: Tensor, stored: tuple[Tensor, ...], length: Tensor, scale: float, latent_dim: int
    ) -> Tensor:
        return torch.ops.megacpp.mla_decode(queries, stored[0], length, None, None, scale, latent_dim)[0]  # type: ignore[no-any-return]


def formats_by_layer(
    codec: str | dict[int, str] | None, layers: int, latent_dim: int, rope_dim: int, dtype: torch.dtype, seed: int
) -> list[RowFormat]:
    """The format of each layer, one object for layers of one format. Raises CacheError."""
    if codec is not None:
        raise CacheError("MLAKVCache", "codec None", codec, "Leave it out")
    return [PlainRows(dtype)] * layers
