"""Random inputs, the same in every run: the seed is the test's own name."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seed_of


class Random:
    """Makes tensors; `TEST_SEED=123 pytest ...` draws others."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype=torch.float64, device="cpu", grad: bool = False) -> torch.Tensor:
        made = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return made.to(device, dtype).requires_grad_(grad)


@pytest.fixture
def rand(request) -> Random:
    return Random(seed_of(request.node.name))
