"""A process group of one rank, for what needs a mesh and no second process."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank():
    """Its mesh."""
    if not dist.is_gloo_available():
        pytest.skip("no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def two_ranks():
    """The mesh of two, of which this process is the first and the other one is made up: nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
