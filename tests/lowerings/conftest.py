"""Fresh random inputs in every run, from a seed that a failing test prints."""

from __future__ import annotations

import os
import secrets

import pytest
import torch


class Random:
    """Makes tensors; `seed` repeats a run: `TEST_SEED=123 pytest ...`."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype=torch.float64, device="cpu", grad: bool = False) -> torch.Tensor:
        made = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return made.to(device, dtype).requires_grad_(grad)


@pytest.fixture
def rand() -> Random:
    seed = int(os.environ.get("TEST_SEED") or secrets.randbelow(2**31))
    print(f"TEST_SEED={seed}")
    return Random(seed)
