"""How operands are handed to Triton's kernels."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="without Triton there are no kernels")


@pytest.mark.parametrize("rows, offset, channels, copied",
                         [(32, 0, 32, False), (48, 0, 32, False), (40, 0, 32, True), (48, 8, 32, False),
                          (48, 4, 32, True), (24, 0, 24, False)])  # fmt: skip
def test_rows_begin_at_sixteens(rand, rows, offset, channels, copied):
    """An offset is told in bytes, 16 of them; and what is not aligned as a copy either stays."""
    from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens

    t = rand(3 * rows, dtype=torch.bfloat16)[offset : 2 * rows + offset].view(1, 2, rows)[..., :channels]
    t = t.unflatten(-1, (1, channels))
    made = in_sixteens(t)
    assert (made is not t) == copied and torch.equal(made, t)
    assert not copied or made.is_contiguous()


def test_a_single_row_moves_nothing(rand):
    from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens, strides

    t = torch.as_strided(rand(64), (1, 2, 32), (7, 32, 1))
    assert strides("t", t, "bt") == {"t_b": 0, "t_t": 32} and in_sixteens(t) is t


def test_channels_are_contiguous(rand):
    from megacpp_compile.lowerings._kernels.triton_launch import in_sixteens

    made = in_sixteens(rand(2, 32, 16).transpose(1, 2))
    assert made.stride() == (512, 32, 1)
