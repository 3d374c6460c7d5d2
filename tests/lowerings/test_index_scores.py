"""`megacpp::index_scores`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.index_scores import index_scores

from . import STRIDES, strided
from .contract import assert_is, assert_keeps, differentiate, gradcheck, tolerances


def arguments(rand, *, b=2, t=3, h=2, c=4, s=5, dtype=torch.float64):
    tensors = (rand(*shape, dtype=dtype, grad=True) for shape in ((b, t, h, c), (b, s, c), (b, t, h)))
    return *tensors, c**-0.5, dtype


def formula(q, k, weights, scale, out_dtype):
    """The op by its definition, one head after the other."""
    total = 0
    for h in range(q.shape[2]):
        products = scale * (q[:, :, h].unsqueeze(2) * k.unsqueeze(1)).sum(-1)
        total = total + weights[:, :, h, None] * products.clamp(min=0)
    return total.to(out_dtype)


def test_gradcheck(rand):
    gradcheck(index_scores, arguments(rand))


@tolerances(1e-13, 3e-6, 6e-3)
@pytest.mark.parametrize("heads", [1, 3])
def test_against_the_formula(rand, dtype, tolerance, heads):
    args = arguments(rand, h=heads, dtype=dtype)
    out, *_ = assert_is(index_scores, formula, rand, args, tolerance, dtype=dtype)
    assert out.dtype == dtype


def test_dtypes_of_their_own(rand):
    """As of models: weights and scores in float32, queries and keys in bfloat16."""
    q, k, weights, scale, _ = arguments(rand, dtype=torch.float32)
    q, k = (t.detach().bfloat16().requires_grad_() for t in (q, k))
    args = q, k, weights, scale, torch.float32
    opcheck(index_scores, args)
    out, *grads = differentiate(index_scores, args, [rand(2, 3, 5)])
    assert out.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("kind", STRIDES)
def test_strided_inputs(rand, kind):
    *_, scale, dtype = arguments(rand)
    args = *(strided(rand, kind, *shape) for shape in ((2, 3, 2, 4), (2, 5, 4), (2, 3, 2))), scale, dtype
    opcheck(index_scores, args)
    assert_is(index_scores, formula, rand, args, 1e-12)


def test_keeps_its_operands(rand):
    args = arguments(rand)
    assert_keeps(index_scores, args, args)
