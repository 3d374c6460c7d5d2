"""`megacpp::norm_linear`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.norm_linear import norm_linear

from . import STRIDES, strided
from .contract import assert_is, assert_keeps, differentiate, leaves, tolerances

EPS = 1e-2  # large enough that its place matters
FORMS = [(False, False), (True, False), (True, True)]  # gain, biases


def arguments(rand, gain=True, bias=True, outer=(2, 3), d=6, ups=(4, 5), dtype=torch.float64, wide=None):
    x = rand(*outer, d, dtype=wide or dtype, grad=True)
    w_norm = rand(d, dtype=wide or dtype, grad=True) if gain else None
    w = [rand(n, d, dtype=dtype, grad=True) for n in ups]
    return x, w_norm, w, [rand(n, dtype=dtype, grad=True) for n in ups] if bias else [], EPS


def formula(x, w_norm, w, b, eps):
    root = ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    normed = x / root * (1 if w_norm is None else w_norm)
    return [(normed[..., None, :] * m).sum(-1) + (b[i] if b else 0) for i, m in enumerate(w)], 1 / root


@tolerances(1e-13, 1e-6, 1e-2)
@pytest.mark.parametrize(("gain", "bias"), FORMS)
def test_against_the_formula(rand, dtype, tolerance, gain, bias):
    assert_is(norm_linear, formula, rand, arguments(rand, gain, bias, dtype=dtype), tolerance, 2, 3, dtype)


def test_residual_in_float32(rand):
    """As under autocast: the projections are bfloat16."""
    args = arguments(rand, dtype=torch.bfloat16, wide=torch.float32)
    opcheck(norm_linear, args)
    y, y2, rrms, *grads = differentiate(norm_linear, args, [rand(2, 3, n) for n in (4, 5)], 3)
    assert (y.dtype, y2.dtype, rrms.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert [g.dtype for g in grads] == [torch.float32] * 2 + [torch.bfloat16] * 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", STRIDES)
def test_strided_input(rand, kind):
    _, *others = arguments(rand)
    opcheck(norm_linear, (strided(rand, kind, 2, 3, 6), *others))


def test_keeps_its_input_and_one_number_a_token(rand):
    args = arguments(rand)
    assert_keeps(norm_linear, args, args[:3], 2)


def test_a_projection_nobody_used(rand):
    args = arguments(rand)
    grads = torch.autograd.grad(norm_linear(*args)[0][0].sum(), leaves(args), allow_unused=True)
    assert grads[3] is None and grads[2].any()
