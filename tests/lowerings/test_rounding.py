"""What is allowed to a lowering: what rounding accounts for on its very inputs, and no more."""

from __future__ import annotations

import pytest
import torch

from .agreement import TIMES_ROUNDING, disagreements, faults, reference_of, tensors_of
from .cases import _scan
from .rounding import moved_by_rounding

UNIT = torch.finfo(torch.float32).eps


def cancelling(x):
    """The sum is about as large as the rounding errors of its terms."""
    return torch.cat((x, -x * (1 + 1e-7))).sum()


def test_a_sum_that_cancels_may_be_off_by_its_terms(rand):
    x = rand(1000)
    (moved,) = moved_by_rounding(cancelling, (x,), UNIT)
    one_by_one = UNIT * x.norm() * x.numel() ** 0.5  # 2000 terms, a random walk of partial sums
    assert 0.1 * one_by_one < moved < one_by_one
    want = cancelling(x)
    assert moved > 10 * UNIT * want.abs()  # its relative error says nothing
    allowed = [TIMES_ROUNDING * moved]
    assert not faults([want + 2 * moved], [want], 8 * UNIT, lambda: allowed)
    assert faults([want + 5 * moved], [want], 8 * UNIT, lambda: allowed)


def test_what_is_well_conditioned_may_not(rand):
    x, w = rand(64, 64), rand(64, 64)
    (moved,) = moved_by_rounding(torch.matmul, (x, w), UNIT)
    assert moved < 2 * UNIT * (x @ w).norm()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("output", range(7))
def test_one_rounding_to_bfloat16_is_found_in_float32(rand, output):
    """In every gradient of the scan, the one of A included, whatever the draw."""
    args = _backward_of(_scan(rand, torch.float32, b=1, t=40), rand)
    got = tensors_of(reference_of("ssd_scan_backward")(*args))
    assert not disagreements(got, "ssd_scan_backward", args)
    got[output] = got[output].bfloat16().float()
    (fault,) = disagreements(got, "ssd_scan_backward", args)
    assert fault.startswith(f"output {output} is off by")


def _backward_of(args, rand):
    *operands, chunk, out = args
    states = reference_of("ssd_scan")(*args)[2]
    return rand(*operands[0].shape, dtype=out), None, *operands, states, chunk
