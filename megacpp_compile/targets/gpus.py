"""GPUs by name, for estimates on a machine that has none of them: memory and bandwidth as the maker states them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """capability: of its chip, (9, 0). memory: bytes. memory_gb_per_s: bandwidth."""

    name: str
    capability: tuple[int, int]
    memory: int
    memory_gb_per_s: float


GPUS = {gpu.name: gpu for gpu in (
    Gpu("a100", (8, 0), 80 * 2**30, 2039.0), Gpu("h100", (9, 0), 80 * 2**30, 3350.0),
    Gpu("h200", (9, 0), 141 * 10**9, 4800.0), Gpu("b200", (10, 0), 180 * 10**9, 8000.0),
)}  # fmt: skip
_supposed: ContextVar[Gpu | None] = ContextVar("supposed", default=None)


def named(device: object) -> Gpu | None:
    """The GPU of a name such as "h100" or "H100"; None for any other device."""
    return GPUS.get(device.lower()) if isinstance(device, str) else None


def supposed() -> Gpu | None:
    """The GPU whose rates predictions of time go by, whatever is here."""
    return _supposed.get()


@contextlib.contextmanager
def supposing(gpu: Gpu | None) -> Iterator[None]:
    """Within it, predictions of time go by the rates of `gpu`; by those of what is here where it is None."""
    token = _supposed.set(gpu)
    try:
        yield
    finally:
        _supposed.reset(token)
