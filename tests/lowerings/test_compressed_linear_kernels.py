"""The kernel of `megacpp::compressed_linear`: the signs of the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from megacpp_compile.lowerings.compressed_linear.signs import signs

from .agreement import DEVICE, OF_KERNELS, rarely

pytestmark = OF_KERNELS


@pytest.mark.parametrize(("rows", "rank", "dtype"),
                         [(37, 5, torch.float16), rarely(1, 1, torch.float64), rarely(16, 8, torch.float32),
                          rarely(96, 80, torch.bfloat16), rarely(130, 33, torch.bfloat16)], ids=str)
def test_signs_are_the_references(rows, rank, dtype):
    """With every word of key and counter in use."""
    from megacpp_compile.lowerings.compressed_linear import cuda_triton

    like = torch.ones((), dtype=dtype, device=DEVICE)
    for seed in (1, (1 << 63) - 1, 0x1234567887654321):
        for draw in (None, torch.tensor(-(1 << 40) - 7, device=like.device)):
            want = signs(rows, rank, draw, seed, like)
            assert torch.equal(cuda_triton.signs(rows, rank, draw, seed, like), want), (seed, draw)
