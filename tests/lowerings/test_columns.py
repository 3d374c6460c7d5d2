"""Results that kernels write to columns of a joined tensor: the same numbers there, and nothing beside them."""

from __future__ import annotations

import importlib

import pytest
import torch

from .agreement import DEVICE, OF_KERNELS, on, rarely
from .cases import CASES

pytestmark = OF_KERNELS
BEFORE, BEHIND = 8, 24
# Op -> the result that goes there, and of which calls.
WRITTEN = {
    "causal_conv1d_backward": (0,
                               ["taps_2_no_bias", "channels_of_a_projection", "fewer_steps_than_taps", "two_segments",
                                "documents_in_a_projection"]),
    "gated_rms_norm_backward": (1, ["one_group", "odd_groups_norm_first", "gate_in_a_projection", "flat", "many_rows"]),
}  # fmt: skip


OF_EACH = [(pytest.param if i in (0, 4) else rarely)(name, label)
           for name, (_, labels) in WRITTEN.items() for i, label in enumerate(labels)]


def columns():
    from megacpp_compile.lowerings._kernels import columns

    return columns


@pytest.mark.parametrize("first", [True, False], ids=["first", "another"])
@pytest.mark.parametrize(("name", "label"), OF_EACH)
def test_columns_of_a_joined_tensor(rand, name, label, first):
    lowering = importlib.import_module(f"megacpp_compile.lowerings.{name.removesuffix('_backward')}.cuda_triton")
    args, (result, _) = on(DEVICE, CASES[name][label](rand, torch.float32)), WRITTEN[name]
    assert lowering.supports(name, args) is None
    alone = getattr(lowering, name)(*args)
    width = alone[result].shape[-1]
    joined = BEFORE + width + BEHIND
    whole = None if first else torch.full((*alone[result].shape[:-1], joined), 7.0, device=DEVICE, dtype=alone[result].dtype)
    places = {result: columns().Columns(whole, BEFORE, joined)}
    there = getattr(lowering, name)(*args, into=places)
    assert lowering.writes_into(name, args) == (result,)
    for i, (own, other) in enumerate(zip(alone, there, strict=True)):
        assert torch.equal(own, other[..., BEFORE : BEFORE + width] if i == result else other)
    if whole is not None:
        beside = torch.cat([whole[..., :BEFORE], whole[..., BEFORE + width :]], -1)
        assert there[result] is whole and bool((beside == 7).all())


@pytest.mark.parametrize("shape", [(2, 5, 3), rarely((7, 300)), rarely((2, 3, 1))], ids=str)
def test_copy(rand, shape):
    piece = rand(*shape, dtype=torch.bfloat16, device=DEVICE)
    whole = torch.full((*shape[:-1], BEFORE + shape[-1] + BEHIND), 7.0, device=DEVICE, dtype=torch.bfloat16)
    want = whole.clone()
    want[..., BEFORE : BEFORE + shape[-1]] = piece
    assert columns().copy(whole, piece, BEFORE) is whole and torch.equal(whole, want)
    assert torch.equal(columns().copy(whole.clone(), piece.transpose(0, 1).contiguous().transpose(0, 1), BEFORE), want)
