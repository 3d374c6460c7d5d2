"""`megacpp::hyper_connection`: registration, gradients, the formula, what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from megacpp_compile.lowerings.hyper_connection import hyper_connection

from .contract import as_leaves, assert_is, assert_keeps, gradcheck, tolerances
from .stream_cases import CONNECTIONS, connection

FORM = pytest.mark.parametrize("form", [name for name in CONNECTIONS if name not in ("twenty_steps", "wide", "no_tokens")])


def arguments(rand, form, dtype=torch.float64, **options):
    return as_leaves(connection(rand, dtype, **{**CONNECTIONS[form], "outer": (2, 3), "d": 5, **options}))


def formula(streams, weight, scale, base, norm_eps, pre, post, init, eps, axes, out_dtype):
    """The op by its definition: each stream, each element of the matrix for itself."""
    n, d = streams.shape[-2:]
    mean = sum(streams[..., i, :].square().sum(-1) for i in range(n)) / (n * d)
    rrms = 1 / (mean + norm_eps).sqrt()
    logits = sum(streams[..., i, :] @ weight[:, i * d : (i + 1) * d].t() for i in range(n)) * rrms[..., None]
    affine = logits * scale + base
    logistic = lambda x: 1 / (1 + torch.exp(-x))  # noqa: E731
    block = sum((logistic(affine[..., i, None]) * pre[0] + pre[1]) * streams[..., i, :] for i in range(n))
    behind = logistic(affine[..., n : 2 * n]) * post[0] + post[1] if post else affine[..., :0]
    if not init:
        return block.to(out_dtype), behind, affine.new_zeros(*affine.shape[:-1], 0, 0), logits, rrms
    x = affine[..., len(affine[0, 0]) - n * n :]
    m = [[x[..., i * n + j] for j in range(n)] for i in range(n)]
    functions = {"sigmoid": logistic, "tanh": torch.tanh, "linear": lambda x: x}
    m = [[functions.get(init, torch.exp)(e) for e in row] for row in m]
    steps = {"softmax": [-1], "softmax_columns": [-2]}.get(init, [])
    for i, axis in enumerate([*steps, *axes]):
        own = eps[1] if i >= len(steps) else 0
        if i == len(steps):
            m = [[e + eps[0] for e in row] for row in m]
        if axis == -2:
            m = list(map(list, zip(*m, strict=True)))
        m = [[e / (sum(row) + own) for e in row] for row in m]
        if axis == -2:
            m = list(map(list, zip(*m, strict=True)))
    if not axes:
        m = [[e + eps[0] for e in row] for row in m]
    mix = torch.stack([torch.stack(row, -1) for row in m], -2)
    return block.to(out_dtype), behind, mix, logits, rrms


@pytest.mark.sampled(3)
@FORM
def test_gradcheck(rand, form):
    if CONNECTIONS[form].get("n", 4) > 4 or CONNECTIONS[form].get("params"):
        pytest.skip("the same formula as of fewer streams, in float64")
    gradcheck(hyper_connection, arguments(rand, form, outer=(2, 1), d=3))


@tolerances(1e-12, 1e-5, 2e-2)
@FORM
def test_against_the_formula(rand, form, dtype, tolerance):
    if dtype == torch.float64 and CONNECTIONS[form].get("params"):
        pytest.skip("parameters in half")
    tolerance = 2e-2 if CONNECTIONS[form].get("params") else tolerance  # their gradients are in half, too
    args = arguments(rand, form, dtype)
    block, *others = assert_is(hyper_connection, formula, rand, args, tolerance, 3, 5, dtype)[:5]
    assert block.dtype == dtype
    assert {t.dtype for t in others} == {torch.promote_types(dtype, torch.float32)}


@pytest.mark.sampled(3)
@FORM
def test_registration(rand, form):
    opcheck(hyper_connection, arguments(rand, form, torch.float32))


def test_twenty_steps_make_it_doubly_stochastic(rand):
    mix = hyper_connection(*arguments(rand, "twenty_steps", eps=[0.0, 0.0]))[2]
    assert (mix.sum(-1) - 1).abs().max() < 1e-5 and (mix.sum(-2) - 1).abs().max() < 1e-12 and mix.min() > 0


def test_logarithms_take_logits_that_are_far_apart(rand):
    """The matrix of such logits has no numbers in float32, its logarithm has."""
    args = list(arguments(rand, "logarithms", torch.float32))
    args[3] = args[3].detach() * 400
    mix = hyper_connection(*args)[2]
    assert mix.isfinite().all() and (mix.sum(-2) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["sinkhorn", "block_alone"])
def test_keeps_operands_and_logits(rand, form):
    args = arguments(rand, form)
    outs = assert_keeps(hyper_connection, args, args[:4], 3, 4)
    assert not outs[3].requires_grad and not outs[4].requires_grad


WRONG = {
    "gumbel": {"init": "gumbel"}, "normalisations": {"axes": [0]}, "epsilon": {"init": "log"},
    "normalisations over": {"init": "", "axes": [-1]}, "factor": {"post": [1.0]},
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_refuses(rand, words):
    with pytest.raises(AssertionError, match=words):
        hyper_connection(*connection(rand, torch.float32, **WRONG[words]))


def test_refuses_a_weight_of_other_rows(rand):
    streams, weight, *others = connection(rand, torch.float32)
    with pytest.raises(AssertionError, match="24 numbers"):
        hyper_connection(streams, weight[1:], *others)
    with pytest.raises(AssertionError, match="each row"):
        hyper_connection(streams, weight, others[0][1:], *others[1:])
