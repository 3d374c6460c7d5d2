"""`megacpp::gated_rms_norm`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.gated_rms_norm import gated_rms_norm

from . import STRIDES, strided
from .contract import assert_is, assert_keeps, differentiate, gradcheck, tolerances

EPS = 1e-2  # large enough that its place matters
# norm before gate, channels in a group of 6, the gate's function
FORMS = [*itertools.product((False, True), (6, 2), ("silu",)), (False, 2, "sigmoid"), (True, 6, "sigmoid")]


def arguments(rand, *, outer=(2, 3), channels=6, group=2, first=True, weight=True, dtype=torch.float64, act="silu"):
    y, z = (rand(*outer, channels, dtype=dtype, grad=True) for _ in range(2))
    return y, z, rand(channels, dtype=dtype, grad=True) if weight else None, EPS, group, first, dtype, act


def formula(y, z, weight, eps, group, norm_before_gate, out_dtype, act):
    """The op by its definition, one group after the other."""
    gate = (z if act == "silu" else 1) / (1 + torch.exp(-z))
    h = y if norm_before_gate else y * gate
    normed, roots = [], []
    for start in range(0, y.shape[-1], group):
        part = h[..., start : start + group]
        root = ((part * part).sum(-1, keepdim=True) / group + eps).sqrt()
        normed.append(part / root)
        roots.append(1 / root)
    out = torch.cat(normed, -1) * (1 if weight is None else weight)
    return (out * gate if norm_before_gate else out).to(out_dtype), torch.cat(roots, -1)


FORM = pytest.mark.parametrize(("first", "group", "act"), FORMS)
WEIGHT = pytest.mark.parametrize("weight", [False, True])


@pytest.mark.sampled(3)
@FORM
@WEIGHT
def test_gradcheck(rand, first, group, act, weight):
    gradcheck(gated_rms_norm, arguments(rand, first=first, group=group, weight=weight, act=act))


@tolerances(1e-13, 3e-6, 6e-3)
@FORM
@WEIGHT
def test_against_the_formula(rand, dtype, tolerance, first, group, act, weight):
    args = arguments(rand, first=first, group=group, weight=weight, dtype=dtype, act=act)
    out, rrms, *_ = assert_is(gated_rms_norm, formula, rand, args, tolerance, results=2, dtype=dtype)
    assert (out.dtype, rrms.dtype) == (dtype, torch.promote_types(dtype, torch.float32))


def test_dtypes_of_their_own(rand):
    """As after a scan in float32: the gate and the weight in bfloat16."""
    y, z, weight, *rest, _, act = arguments(rand, dtype=torch.float32)
    z, weight = (t.detach().bfloat16().requires_grad_() for t in (z, weight))
    args = y, z, weight, *rest, torch.bfloat16, act
    opcheck(gated_rms_norm, args)
    out, rrms, *grads = differentiate(gated_rms_norm, args, [rand(*y.shape)], 2)
    assert (out.dtype, rrms.dtype) == (torch.bfloat16, torch.float32)
    assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("first", [False, True])
def test_strided_inputs(rand, kind, first):
    _, _, *others = arguments(rand, first=first)
    args = strided(rand, kind, 2, 3, 6), strided(rand, kind, 2, 3, 6), *others
    opcheck(gated_rms_norm, args)
    assert_is(gated_rms_norm, formula, rand, args, 1e-12, results=2)


@WEIGHT
def test_keeps_operands_and_one_number_a_group(rand, weight):
    args = arguments(rand, weight=weight)
    assert not assert_keeps(gated_rms_norm, args, args, 1)[1].requires_grad


def test_another_function_is_an_error(rand):
    with pytest.raises(AssertionError, match="gelu"):
        gated_rms_norm(*arguments(rand, act="gelu"))
