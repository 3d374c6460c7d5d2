"""The seed of a test: its own name, so that every run draws the same inputs. Fresh draws are the fuzz drivers'.

`TEST_SEED=123` draws others, in all tests: it moves the seeds that are written in models and helpers, too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

import torch

MOVED_BY = int(os.environ.get("TEST_SEED") or 0)


def seed_of(name: str) -> int:
    """The seed of what is called `name`: a test, "test_case[parameters]", a fixture or a module."""
    return zlib.crc32(name.encode()) >> 1


class Draws:
    """Makes tensors of normal numbers, the same for the same name."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed_of(name)), dtype

    def __call__(
        self, *shape: int, dtype: torch.dtype | None = None, device: str = "cpu", grad: bool = False
    ) -> torch.Tensor:
        made = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return made.to(device, dtype or self.dtype).requires_grad_(grad)


_Generator = torch.Generator


class _AnyGenerator(type(_Generator)):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)  # the default ones too


class _MovedGenerator(_Generator, metaclass=_AnyGenerator):
    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(seed + MOVED_BY)


def _moved(manual_seed: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda seed: manual_seed(seed + MOVED_BY)


def move_written_seeds() -> None:
    """Where TEST_SEED is set: numbers in `torch.manual_seed(3)` and `torch.Generator().manual_seed(3)` are moved by it."""
    if MOVED_BY:
        torch.Generator = _MovedGenerator  # type: ignore[misc]
        torch.manual_seed = torch.random.manual_seed = _moved(torch.manual_seed)
