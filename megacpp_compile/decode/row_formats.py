"""How a cache of latents stores a row: plain, in fp8, or at about 4 bits by TurboQuant or PolarQuant.

    bytes of a row        512 + 64 channels     beside bfloat16
    plain                 1152                  1
    fp8                   576 + 4               1.99
    turboquant            288 + 8               3.89
    polarquant            288                   4

Each part of a row, the latent and the key row, is encoded by itself.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

# Registers the op, here and not where it is called: Dynamo traces that.
import megacpp_compile.lowerings.mla_decode  # noqa: F401
from megacpp_compile.decode.codecs import PolarQuant, TurboQuant
from megacpp_compile.errors import CodecError, closest
from megacpp_compile.lowerings._kernels.fp8 import round_to_fp8

E4M3 = torch.float8_e4m3fn
NAMES = ("fp8", "turboquant", "polarquant")


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


def _decode(queries: Tensor, *args: Tensor | float | None) -> Tensor:
    return torch.ops.megacpp.mla_decode(queries, *args)[0]  # type: ignore[no-any-return]


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
        return _decode(queries, stored[0], length, None, None, scale, latent_dim)


class Fp8Rows:
    """e4m3, with one float32 scale a row. The payload is kept as bytes: CPUs of torch 2.9 write no rows of float8."""

    name = "fp8"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def components(self, latent_dim: int, rope_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        return (latent_dim + rope_dim, torch.uint8), (1, torch.float32)

    def encode(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        payload, scale = round_to_fp8(torch.cat((latent, rope), -1).float(), E4M3)
        return payload.view(torch.uint8), scale

    def decode(self, stored: tuple[Tensor, ...], latent_dim: int, rope_dim: int) -> Tensor:
        return (stored[0].view(E4M3).float() * stored[1]).to(self.dtype)

    def attend(
        self, queries: Tensor, stored: tuple[Tensor, ...], length: Tensor, scale: float, latent_dim: int
    ) -> Tensor:
        return _decode(queries, stored[0].view(E4M3), length, stored[1], None, scale, latent_dim)


class _RotatedRows:
    """Attention over rows that stay rotated: queries are rotated once, and what comes out is rotated back once."""

    latent: TurboQuant | PolarQuant
    rope: TurboQuant | PolarQuant
    dtype: torch.dtype

    def encode(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        parts = self.latent.encode(latent), self.rope.encode(rope)
        return torch.cat([part.payload for part in parts], -1), torch.cat([part.side for part in parts], -1)

    def rotated(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Rotated latents and key rows, float32."""
        raise NotImplementedError

    def decode(self, stored: tuple[Tensor, ...], latent_dim: int, rope_dim: int) -> Tensor:
        latent, rope = self.rotated(stored)
        return torch.cat((self.latent.rotate_back(latent), self.rope.rotate_back(rope)), -1).to(self.dtype)

    def queries(self, queries: Tensor, latent_dim: int) -> Tensor:
        latent, rope = queries[..., :latent_dim], queries[..., latent_dim:]
        return torch.cat((self.latent.rotate(latent), self.rope.rotate(rope)), -1).to(queries.dtype)


class TurboRows(_RotatedRows):
    """4 bits a channel and the two parts' norms; the kernel of `mla_decode` reads them as they are."""

    name = "turboquant"

    def __init__(
        self, latent_dim: int, rope_dim: int, dtype: torch.dtype, seed: int, device: torch.device | str | None
    ) -> None:
        latent, rope = TurboQuant(latent_dim, seed, device), TurboQuant(rope_dim, seed + 1, device)
        self.latent, self.rope, self.codebook, self.dtype = latent, rope, latent.codebook, dtype

    def components(self, latent_dim: int, rope_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        return ((latent_dim + rope_dim) // 2, torch.uint8), (2, torch.float32)

    def rotated(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        payload, norms = stored
        half = self.latent.channels // 2
        latent = self.latent.widened(payload[..., :half], norms[..., :1])
        return latent, self.rope.widened(payload[..., half:], norms[..., 1:])

    def attend(
        self, queries: Tensor, stored: tuple[Tensor, ...], length: Tensor, scale: float, latent_dim: int
    ) -> Tensor:
        payload, norms = stored
        turned = self.queries(queries, latent_dim)
        out = _decode(turned, payload, length, norms, self.codebook, scale, latent_dim)
        return self.latent.rotate_back(out).to(queries.dtype)


class PolarRows(_RotatedRows):
    """Angles and a radius for each 16 channels. Rows are widened before attention, rotated as they are."""

    name = "polarquant"

    def __init__(
        self, latent_dim: int, rope_dim: int, dtype: torch.dtype, seed: int, device: torch.device | str | None
    ) -> None:
        self.latent, self.rope = PolarQuant(latent_dim, seed, device), PolarQuant(rope_dim, seed + 1, device)
        self.dtype = dtype

    def components(self, latent_dim: int, rope_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        blocks = (latent_dim + rope_dim) // 16
        return (6 * blocks, torch.uint8), (blocks, torch.float16)

    def rotated(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        payload, radii = stored
        blocks = self.latent.channels // 16
        latent = self.latent.widened(payload[..., : 6 * blocks], radii[..., :blocks])
        return latent, self.rope.widened(payload[..., 6 * blocks :], radii[..., blocks:])

    def attend(
        self, queries: Tensor, stored: tuple[Tensor, ...], length: Tensor, scale: float, latent_dim: int
    ) -> Tensor:
        rows = torch.cat(self.rotated(stored), -1).to(queries.dtype)
        out = _decode(self.queries(queries, latent_dim), rows, length, None, None, scale, latent_dim)
        return self.latent.rotate_back(out).to(queries.dtype)


def formats_by_layer(
    codec: str | dict[int, str] | None, layers: int, latent_dim: int, rope_dim: int, dtype: torch.dtype, seed: int,
    device: torch.device | str | None,
) -> list[RowFormat]:  # fmt: skip
    """The format of each layer, one object for all layers of a format. Raises CodecError."""
    plain: RowFormat = PlainRows(dtype)
    if codec is None:
        return [plain] * layers
    names = dict.fromkeys(range(layers), codec) if isinstance(codec, str) else codec
    if not names or (odd := [layer for layer in names if layer not in range(layers)]):
        what = f"layers {odd}" if names else "no layer"
        raise CodecError("codec", f"a map of layers from 0 to {layers - 1}, not of {what}", "Name the layers to encode")
    made: dict[str, RowFormat] = {}
    for name in dict.fromkeys(names.values()):
        if name not in NAMES:
            meant = closest(name, NAMES)
            hint = f"Did you mean {meant!r}?" if meant else "Leave it out for plain rows"
            raise CodecError("codec", f"one of {', '.join(NAMES)}, not {name!r}", hint)
        if name == "fp8":
            made[name] = Fp8Rows(dtype)
        else:
            kind = TurboRows if name == "turboquant" else PolarRows
            made[name] = kind(latent_dim, rope_dim, dtype, seed, device)
    return [made[names[layer]] if layer in names else plain for layer in range(layers)]
