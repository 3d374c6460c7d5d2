"""TurboQuant and PolarQuant: vectors at about 4 bits a channel, by rules that know no data.

Both rotate a vector by one random orthogonal matrix, made from a seed, after which its channels are all alike: close to
normal numbers of variance |x|^2 / d. Nothing is calibrated, and a row is stored as it comes, whatever came before.

TurboQuant (https://arxiv.org/abs/2504.19874, without its second stage, a sketch of the residual): the norm, and for
each channel the nearest of 16 numbers, those with the least square error for normal numbers (Lloyd-Max). The square
error of a row is 0.0095 of its own square, and never above sqrt(3) pi / 2 * 4^-4 = 0.0106 in the mean.

PolarQuant (https://arxiv.org/abs/2502.02617): polar coordinates of pairs, of pairs of their radii and so on, in blocks
of 16 channels: 8 angles of 4 bits, and 4 + 2 + 1 of 2 bits, whose laws are known, and one float16 radius a block. 62
bits are kept in 64. `expected_error` is its square error, from those laws.

Inner products need no rotation back: q . x = (R q) . (R x). Inference only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megacpp_compile.errors import CodecError

BLOCK = 16


@dataclass(frozen=True)
class Encoded:
    """Vectors as a codec stores them.

    Attributes:
        by: (codec, channels, seed) that made it, and that alone can read it.
        payload: uint8 [..., bytes].
        side: what goes with it; TurboQuant's norms over sqrt(d), float32 [..., 1], PolarQuant's radii, float16
            [..., d / 16].
    """

    by: tuple[str, int, int]
    payload: Tensor
    side: Tensor


class _Rotating:
    """What both share.

    Args:
        channels: of a vector.
        seed: of the rotation.
        device: of the tables.
    """

    name: ClassVar[str]
    multiple: ClassVar[int]
    bits: ClassVar[int] = 4

    def __init__(self, channels: int, seed: int = 0, device: torch.device | str | None = None) -> None:
        if channels < 1 or channels % self.multiple:
            raise CodecError(self.name, f"channels in multiples of {self.multiple}, not {channels}",
                             "Store such rows plain or in fp8")  # fmt: skip
        self.channels, self.seed = channels, seed
        self.rotation = rotation(channels, seed).to(device)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.channels, self.seed

    def rotate(self, x: Tensor) -> Tensor:
        """R x in float32, of x [..., d]."""
        return x.float() @ self.rotation.t()

    def rotate_back(self, y: Tensor) -> Tensor:
        """R^T y in float32."""
        return y.float() @ self.rotation

    def encode(self, x: Tensor) -> Encoded:
        """x [..., d] as it is stored."""
        if x.shape[-1] != self.channels:
            raise CodecError(self.name, f"vectors of {self.channels} channels, not {x.shape[-1]}", "Make one for these")
        if torch.is_grad_enabled() and x.requires_grad:
            raise CodecError(self.name, "vectors without a gradient", "Encode under torch.no_grad()")
        return Encoded(self.key, *self.quantised(self.rotate(x)))

    def decode(self, encoded: Encoded) -> Tensor:
        """[..., d] float32, of what `encode` returned."""
        if encoded.by != self.key:
            raise CodecError(self.name, f"what {self.key} stored, not {encoded.by}", "Decode by the codec that encoded")
        return self.rotate_back(self.widened(encoded.payload, encoded.side))

    def quantised(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(payload, side) of rotated vectors."""
        raise NotImplementedError

    def widened(self, payload: Tensor, side: Tensor) -> Tensor:
        """The rotated vectors, float32."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Of one vector, with what goes with it."""
        raise NotImplementedError


class TurboQuant(_Rotating):
    """The norm, and 4 bits a channel; two channels a byte, i and i + d / 2."""

    name, multiple = "turboquant", 2
    # The bound on the mean square error of a unit vector.
    bound = math.sqrt(3) * math.pi / 2 * 4**-4

    def __init__(self, channels: int, seed: int = 0, device: torch.device | str | None = None) -> None:
        super().__init__(channels, seed, device)
        self.codebook = normal_codebook().to(device)
        self.borders = (self.codebook[1:] + self.codebook[:-1]) / 2

    def quantised(self, y: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True) / self.channels**0.5
        codes = torch.bucketize(y / torch.where(norm > 0, norm, 1.0), self.borders).to(torch.uint8)
        low, high = codes.chunk(2, -1)
        return low | (high << 4), norm

    def widened(self, payload: Tensor, side: Tensor) -> Tensor:
        codes = torch.cat((payload & 15, payload >> 4), -1).long()
        return self.codebook[codes] * side

    def nbytes(self) -> int:
        return self.channels // 2 + 4


class PolarQuant(_Rotating):
    """Angles and a radius for each 16 channels: 6 bytes and a float16."""

    name, multiple = "polarquant", BLOCK

    def __init__(self, channels: int, seed: int = 0, device: torch.device | str | None = None) -> None:
        super().__init__(channels, seed, device)
        self.angles = [angle_codebook(level).to(device) for level in (2, 3, 4)]

    @property
    def expected_error(self) -> float:
        """The mean square error of a unit vector: 2 (1 - c), c the product over levels of an angle's error's mean
        cosine."""
        cosine = math.sin(math.pi / 16) / (math.pi / 16)
        for level in (2, 3, 4):
            cosine *= mean_cosine(level)
        return 2 * (1 - cosine)

    def quantised(self, y: Tensor) -> tuple[Tensor, Tensor]:
        blocks = y.unflatten(-1, (-1, BLOCK))
        first, second = blocks[..., ::2], blocks[..., 1::2]
        turn = torch.atan2(second, first) / (2 * math.pi)
        codes = torch.floor((turn - torch.floor(turn)) * 16).clamp(0, 15).to(torch.uint8)
        parts = [codes[..., :4] | (codes[..., 4:] << 4)]  # 4 bytes
        radius, small = torch.sqrt(first * first + second * second), []
        for book in self.angles:
            first, second = radius[..., ::2], radius[..., 1::2]
            small.append(torch.bucketize(torch.atan2(second, first), (book[1:] + book[:-1]) / 2).to(torch.uint8))
            radius = torch.sqrt(first * first + second * second)
        # 4 + 2 + 1 angles of 2 bits, and 2 bits of nothing.
        fours = torch.cat((*small, torch.zeros_like(small[-1])), -1)
        parts.append(fours[..., :2] | (fours[..., 2:4] << 2) | (fours[..., 4:6] << 4) | (fours[..., 6:8] << 6))
        largest = torch.finfo(torch.float16).max
        return torch.cat(parts, -1).flatten(-2), radius.squeeze(-1).clamp(max=largest).to(torch.float16)

    def widened(self, payload: Tensor, side: Tensor) -> Tensor:
        bytes_ = payload.unflatten(-1, (-1, 6))
        codes = torch.cat((bytes_[..., :4] & 15, bytes_[..., :4] >> 4), -1)
        fours = torch.cat([(bytes_[..., 4:] >> shift) & 3 for shift in (0, 2, 4, 6)], -1).long()
        found = side.float().unsqueeze(-1)
        for book, where in zip(reversed(self.angles), (slice(6, 7), slice(4, 6), slice(0, 4)), strict=True):
            angle = book[fours[..., where]]
            found = torch.stack((found * torch.cos(angle), found * torch.sin(angle)), -1).flatten(-2)
        angle = (codes.float() + 0.5) * (2 * math.pi / 16)
        found = torch.stack((found * torch.cos(angle), found * torch.sin(angle)), -1).flatten(-2)
        return found.flatten(-2)

    def nbytes(self) -> int:
        return self.channels // BLOCK * 8


# --- tables, each worked out once


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def rotation(channels: int, seed: int) -> Tensor:
    """[d, d] float32, orthogonal: of the QR decomposition of normal numbers, with the signs that make it uniform."""
    drawn = torch.randn(channels, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(drawn)
    return (q * r.diagonal().sign()).float()


def _lloyd_max(points: Tensor, weights: Tensor, levels: int) -> Tensor:
    """The `levels` numbers with the least mean square error for a law given by weights at equally far points."""
    # Integrals up to each point, read in between: sums over whole points would stop where no point changes sides.
    mass, moment = (w.cumsum(0) - w / 2 for w in (weights, weights * points))
    step = float(points[1] - points[0])

    def until(integral: Tensor, borders: Tensor) -> Tensor:
        at = ((borders - points[0]) / step).clamp(0, len(points) - 1.000001)
        low = at.floor().long()
        return torch.lerp(integral[low], integral[low + 1], at - low)

    ends = points[[0, -1]]
    book = points[torch.searchsorted(mass / mass[-1], (torch.arange(levels, dtype=torch.float64) + 0.5) / levels)]
    for _ in range(5000):
        borders = torch.cat((ends[:1], (book[1:] + book[:-1]) / 2, ends[1:]))
        mean = until(moment, borders).diff() / until(mass, borders).diff()
        moved, book = float((mean - book).abs().max()), mean
        if moved < 1e-10:
            break
    return book


@functools.cache
@torch.inference_mode(False)
def normal_codebook() -> Tensor:
    """[16] float32: Lloyd-Max of a normal law of variance 1, symmetric."""
    points = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    book = _lloyd_max(points, torch.exp(-points * points / 2), 16)
    return ((book - book.flip(0)) / 2).float()


def _angles(level: int) -> tuple[Tensor, Tensor]:
    """Points and weights of the law of an angle: of two radii that each are of 2^(level - 1) normal numbers."""
    points = torch.linspace(0, math.pi / 2, 20001, dtype=torch.float64)
    return points, torch.sin(2 * points).clamp(min=0) ** (2 ** (level - 1) - 1)


@functools.cache
@torch.inference_mode(False)
def angle_codebook(level: int) -> Tensor:
    """[4] float32: Lloyd-Max of the angles of a level from 2 on."""
    return _lloyd_max(*_angles(level), 4).float()


@functools.cache
def mean_cosine(level: int) -> float:
    """Of the error of an angle of that level."""
    points, weights = _angles(level)
    book = angle_codebook(level).double()
    nearest = book[torch.bucketize(points, (book[1:] + book[:-1]) / 2)]
    return float((torch.cos(points - nearest) * weights).sum() / weights.sum())
