"""`megacpp::norm_linear`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.norm_linear import norm_linear, norm_linear_backward

from . import STRIDES, addresses, relative_error, saved_by, strided

EPS = 1e-2  # large enough that its place matters
FORMS = [(False, False), (True, False), (True, True)]  # gain, biases


def arguments(rand, gain=True, bias=True, outer=(2, 3), d=6, ups=(4, 5), dtype=torch.float64, wide=None):
    x = rand(*outer, d, dtype=wide or dtype, grad=True)
    w_norm = rand(d, dtype=wide or dtype, grad=True) if gain else None
    w = [rand(n, d, dtype=dtype, grad=True) for n in ups]
    return x, w_norm, w, [rand(n, dtype=dtype, grad=True) for n in ups] if bias else [], EPS


def leaves(args):
    x, w_norm, w, b, _ = args
    return [x, *([] if w_norm is None else [w_norm]), *w, *b]


def formula(x, w_norm, w, b, eps):
    root = ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    normed = x / root * (1 if w_norm is None else w_norm)
    return [(normed[..., None, :] * m).sum(-1) + (b[i] if b else 0) for i, m in enumerate(w)], 1 / root


def differentiate(function, args, seeds):
    y, rrms = function(*args)
    loss = sum((out * seed.to(out)).sum() for out, seed in zip(y, seeds, strict=True))
    return [*y, rrms, *torch.autograd.grad(loss, leaves(args))]


@pytest.mark.parametrize(("gain", "bias"), FORMS)
def test_opcheck(rand, gain, bias):
    opcheck(norm_linear, arguments(rand, gain, bias))


@pytest.mark.parametrize("outer", [(1,), (0, 3), (2, 1, 3)], ids=str)
def test_opcheck_shapes(rand, outer):
    opcheck(norm_linear, arguments(rand, outer=outer))


def test_opcheck_backward(rand):
    x, w_norm, w, _, _ = arguments(rand)
    x, w_norm, *w = (t.detach() for t in (x, w_norm, *w))
    for gain, biased in ((w_norm, True), (None, False)):
        opcheck(norm_linear_backward, ([rand(2, 3, len(m)) for m in w], x, gain, w, rand(2, 3, 1).exp(), biased))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize(("gain", "bias"), FORMS)
def test_against_the_formula(rand, dtype, tolerance, gain, bias):
    """Rounding alone: the formula sees the same rounded inputs, in float64."""
    args = arguments(rand, gain, bias, dtype=dtype)
    wide = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().double().requires_grad_(), args)
    seeds = [rand(2, 3, n, dtype=dtype) for n in (4, 5)]
    got, want = differentiate(norm_linear, args, seeds), differentiate(formula, wide, seeds)
    assert [t.dtype for t in got[3:]] == [t.dtype for t in leaves(args)]
    assert all(relative_error(g, w) < tolerance for g, w in zip(got, want, strict=True))


def test_residual_in_float32(rand):
    """As under autocast: the projections are bfloat16."""
    args = arguments(rand, dtype=torch.bfloat16, wide=torch.float32)
    opcheck(norm_linear, args)
    y, y2, rrms, *grads = differentiate(norm_linear, args, [rand(2, 3, n) for n in (4, 5)])
    assert (y.dtype, y2.dtype, rrms.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert [g.dtype for g in grads] == [torch.float32] * 2 + [torch.bfloat16] * 4


@pytest.mark.parametrize("kind", STRIDES)
def test_strided_input(rand, kind):
    _, *others = arguments(rand)
    opcheck(norm_linear, (strided(rand, kind, 2, 3, 6), *others))


def test_keeps_its_input_and_one_number_a_token(rand):
    args = arguments(rand)
    outputs = []
    kept = saved_by(lambda: outputs.append(norm_linear(*args)))
    x, w_norm, w, _, _ = args
    assert kept == addresses(x, w_norm, *w, outputs[0][1])


def test_a_projection_nobody_used(rand):
    args = arguments(rand)
    grads = torch.autograd.grad(norm_linear(*args)[0][0].sum(), leaves(args), allow_unused=True)
    assert grads[3] is None and grads[2].any()


def test_autocast_does_not_reach_inside(rand):
    args = arguments(rand, dtype=torch.float32)
    want = norm_linear(*args)
    with torch.autocast("cpu", torch.bfloat16):
        got = norm_linear(*args)
    assert all(torch.equal(a, b) for a, b in zip((*got[0], got[1]), (*want[0], want[1]), strict=True))
