"""`megacpp::gated_rms_norm`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward

from . import STRIDES, addresses, relative_error, saved_by, strided

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


def differentiate(function, args, seed):
    out, rrms = function(*args)
    leaves = [t for t in args[:3] if t is not None]
    return [out, rrms, *torch.autograd.grad((out * seed.to(out)).sum(), leaves)]


@pytest.mark.parametrize(("first", "group", "act"), FORMS)
@pytest.mark.parametrize("weight", [False, True])
def test_opcheck(rand, first, group, act, weight):
    opcheck(gated_rms_norm, arguments(rand, first=first, group=group, weight=weight, act=act))


@pytest.mark.parametrize("outer", [(), (1,), (0, 3), (2, 1, 3)], ids=str)
def test_opcheck_shapes(rand, outer):
    opcheck(gated_rms_norm, arguments(rand, outer=outer))


def test_opcheck_backward(rand):
    y, z, weight, *_ = (t.detach() if isinstance(t, torch.Tensor) else t for t in arguments(rand))
    for w, first, act in ((weight, True, "silu"), (None, False, "sigmoid")):
        opcheck(gated_rms_norm_backward, (rand(*y.shape), y, z, w, rand(2, 3, 3).exp(), 2, first, act))


@pytest.mark.parametrize(("first", "group", "act"), FORMS)
@pytest.mark.parametrize("weight", [False, True])
def test_gradcheck(rand, first, group, act, weight):
    y, z, w, *rest = arguments(rand, first=first, group=group, weight=weight, act=act)
    leaves = (y, z, w) if weight else (y, z)
    assert torch.autograd.gradcheck(lambda y, z, w=None: gated_rms_norm(y, z, w, *rest)[0], leaves)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 6e-3)], ids=str
)
@pytest.mark.parametrize(("first", "group", "act"), FORMS)
@pytest.mark.parametrize("weight", [False, True])
def test_against_the_formula(rand, dtype, tolerance, first, group, act, weight):
    """Rounding alone: the formula sees the same rounded inputs, in float64."""
    args = arguments(rand, first=first, group=group, weight=weight, dtype=dtype, act=act)
    wide = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in args[:-2]]
    seed = rand(*args[0].shape, dtype=dtype)
    got = differentiate(gated_rms_norm, args, seed)
    want = differentiate(formula, (*wide, torch.float64, act), seed)
    assert [t.dtype for t in got] == [dtype, torch.promote_types(dtype, torch.float32), *[dtype] * (len(got) - 2)]
    assert all(relative_error(g, w) < tolerance for g, w in zip(got, want, strict=True))


def test_dtypes_of_their_own(rand):
    """As after a scan in float32: the gate and the weight in bfloat16."""
    y, z, weight, *rest, _, act = arguments(rand, dtype=torch.float32)
    z, weight = (t.detach().bfloat16().requires_grad_() for t in (z, weight))
    args = y, z, weight, *rest, torch.bfloat16, act
    opcheck(gated_rms_norm, args)
    out, rrms, *grads = differentiate(gated_rms_norm, args, rand(*y.shape))
    assert (out.dtype, rrms.dtype) == (torch.bfloat16, torch.float32)
    assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("first", [False, True])
def test_strided_inputs(rand, kind, first):
    _, _, *others = arguments(rand, first=first)
    args = strided(rand, kind, 2, 3, 6), strided(rand, kind, 2, 3, 6), *others
    opcheck(gated_rms_norm, args)
    seed = rand(2, 3, 6)
    got, want = (differentiate(f, args, seed) for f in (gated_rms_norm, formula))
    assert all(relative_error(g, w) < 1e-12 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("weight", [False, True])
def test_keeps_operands_and_one_number_a_group(rand, weight):
    args = arguments(rand, weight=weight)
    outputs = []
    kept = saved_by(lambda: outputs.append(gated_rms_norm(*args)))
    assert kept == addresses(*(t for t in args[:3] if t is not None), outputs[0][1])


def test_another_function_is_an_error(rand):
    with pytest.raises(AssertionError, match="gelu"):
        gated_rms_norm(*arguments(rand, act="gelu"))


def test_rrms_has_no_gradient(rand):
    assert not gated_rms_norm(*arguments(rand))[1].requires_grad


def test_autocast_does_not_reach_inside(rand):
    args = arguments(rand, dtype=torch.float32)
    want = gated_rms_norm(*args)
    with torch.autocast("cpu", torch.bfloat16):
        got = gated_rms_norm(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
