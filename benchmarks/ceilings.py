"""What the device can do at most, measured in the same run: the unit of every floor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes that have to be moved and FLOPs that have to be computed."""

    bytes: float = 0.0
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a large device copy (read and write counted), FLOP/s of a large GEMM."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    turns: dict[str, list[float]]

    def milliseconds(self, work: Work) -> float:
        """No kernel can be faster: the longer of moving and computing."""
        return 1e3 * max(work.bytes / self.copy_bytes_per_s, work.flops / self.matmul_flops_per_s)


def measure(device: torch.device, quick: bool, turns: int, timed: Callable[[Callable[[], Any]], float]) -> Ceilings:
    """`timed` gives the milliseconds of one call."""
    n, size = (256, 2**22) if quick else (8192, 2**31)
    source = torch.empty(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copies = [timed(lambda: target.copy_(source)) for _ in range(turns)]
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    gemms = [timed(lambda: a @ b) for _ in range(turns)]
    # The best turn: a ceiling is what was reached, not what is usual.
    return Ceilings(2e3 * size / min(copies), 2e3 * n**3 / min(gemms), {"copy_ms": copies, "matmul_ms": gemms})
